"""Cached experts in a model: transformers' loop indexes a fused parameter by expert, and a cache answers.

The cache learns what a layer's router chose before the loop begins, and what the next layer's probably will: the drive
reads while attention is computed, too.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nearflash.offload.weights.experts.cache import ExpertCache
from nearflash.offload.weights.experts.mixture import MixtureLayer

__all__ = ["ExpertPatch"]


class _ExpertRows:
    """In the place of a fused parameter: its rows by expert."""

    def __init__(self, cache: ExpertCache, mixture: int, leaf: str) -> None:
        self._cache, self._mixture, self._leaf = cache, mixture, leaf

    def __getitem__(self, expert: Any) -> Tensor:
        return self._cache.tensor(self._mixture, int(expert), self._leaf)


class ExpertPatch:
    """Modules of `mixtures` with the experts of `cache`, until it is closed."""

    def __init__(self, mixtures: Sequence[MixtureLayer], cache: ExpertCache) -> None:
        self._mixtures, self._cache = mixtures, cache
        self._replaced: list[tuple[Any, dict[str, Any]]] = []
        for index, mixture in enumerate(mixtures):
            self._replace(index, mixture)

    def close(self) -> None:
        """Put the model's parameters back; may be called twice."""
        for module, parameters in self._replaced:
            del module.forward
            for leaf, parameter in parameters.items():
                delattr(module, leaf)
                module._parameters[leaf] = parameter
        self._replaced = []

    def _replace(self, index: int, mixture: MixtureLayer) -> None:
        module = mixture.module
        parameters = {leaf: module._parameters.pop(leaf) for leaf in mixture.sources}
        self._replaced.append((module, parameters))
        for leaf in parameters:
            setattr(module, leaf, _ExpertRows(self._cache, index, leaf))
        forward = module.forward

        def forward_routed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            self._route(index, next(value for value in tensors if not value.is_floating_point()), hidden_states)
            return forward(hidden_states, *args, **kwargs)

        module.forward = forward_routed

    def _route(self, index: int, chosen: Tensor, hidden_states: Tensor) -> None:
        """The loop of this layer begins: it will ask for the experts `chosen` (tokens, k), in ascending order."""
        numbers, counts = (values.tolist() for values in chosen.unique(return_counts=True))
        experts = self._mixtures[index].experts
        self._cache.plan(index, {n: count for n, count in zip(numbers, counts, strict=True) if n < experts})
        if self._cache.ahead:
            following = self._mixtures[index + 1 : index + 2]
            self._cache.read_ahead([
                (index + 1, expert) for mixture in following for expert in mixture.likely_experts(hidden_states)
            ])  # fmt: skip
