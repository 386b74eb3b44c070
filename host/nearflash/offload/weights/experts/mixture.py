"""The mixtures of a model: their modules, their routers, and where the parameters of each expert come from.

transformers keeps a layer's experts in fused parameters, (experts, …).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearflash.storage.io.checksum import crc32c
from nearflash.weights.sources import Source, SourcePiece

__all__ = ["MixtureLayer", "add_row_checksums", "expert_source", "find_mixtures"]


@dataclass(frozen=True)
class MixtureLayer:
    """The experts of one decoder layer."""

    number: int
    """Of the layer."""
    module: Any
    """Whose forward loops over experts."""
    router: Any
    sources: dict[str, Source]
    """Of the fused parameters, by name in `module`."""

    @property
    def experts(self) -> int:
        """How many there are."""
        return next(iter(self.sources.values())).experts

    def likely_experts(self, hidden_states: Tensor) -> list[int]:
        """Experts that the router names for the hidden states of the layer before, the most likely first.

        States change little from layer to layer. Source: "Fast Inference of Mixture-of-Experts Language Models with
        Offloading" (arXiv 2312.17238), section 3.2.
        """
        if self.router is None or self.router.weight.is_meta:
            return []
        outputs = [value for value in self.router(hidden_states) if isinstance(value, Tensor)]
        chosen = next((value for value in reversed(outputs) if not value.is_floating_point()), None)
        if chosen is None:
            return []
        weights = [value for value in outputs if value.is_floating_point() and value.shape == chosen.shape]
        likely = torch.zeros(self.experts, device=chosen.device)
        likely.index_add_(0, chosen.flatten(), (weights[-1] if weights else torch.ones_like(chosen)).float().flatten())
        order: list[int] = likely.argsort(descending=True).tolist()
        return order[: int(likely.count_nonzero())]


def find_mixtures(
    layers: Sequence[Any], sources: Sequence[dict[str, Source]], numbers: Sequence[int]
) -> list[MixtureLayer]:
    """The layers among `numbers` whose experts can be read one by one; their sources are taken out of `sources`.

    Parameters of a matrix for each expert count, in a module with `num_experts` whose implementation can be chosen.
    """
    mixtures = []
    for number in numbers:
        for name, module in layers[number].named_modules():
            if not isinstance(getattr(module, "num_experts", None), int) or not hasattr(module, "is_transposed"):
                continue
            fused = {
                leaf: sources[number][f"{name}.{leaf}"] for leaf in module._parameters
                if len(sources[number][f"{name}.{leaf}"].shape) == 3 and sources[number][f"{name}.{leaf}"].experts
            }  # fmt: skip
            parent = layers[number].get_submodule(name.rpartition(".")[0])
            router = next((child for child in parent.children() if _is_router(child, module.num_experts)), None)
            if fused:
                for leaf in fused:
                    del sources[number][f"{name}.{leaf}"]
                mixtures.append(MixtureLayer(number, module, router, fused))
                break
    return mixtures


def _is_router(module: Any, experts: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == experts and hasattr(module, "top_k")


def expert_source(source: Source, expert: int) -> Source:
    """A fused parameter's source for one expert."""
    shape = source.shape[1:]
    pieces = [piece for piece in source.pieces if piece.place and piece.place[0] == expert]
    if not pieces:
        return replace(source, shape=shape, pieces=(SourcePiece(source.pieces[0].tensor.row(expert)),))
    is_whole = len(pieces) == 1
    return replace(
        source, shape=shape,
        pieces=tuple(replace(piece, place=() if is_whole else piece.place[1:]) for piece in pieces),
    )  # fmt: skip


def add_row_checksums(source: Source) -> Source:
    """A fused parameter's source, with a checksum of each expert where its file has one of all experts alone.

    Reads such a tensor once, as files of version 1 have it. Raises WeightsError where it is damaged.
    """
    tensor = source.pieces[0].tensor
    if source.pieces[0].place or tensor.checksum is None or tensor.row_checksums:
        return source
    rows, whole = [], 0
    for number in range(tensor.shape[0]):
        data = tensor.row(number).load()
        rows.append(crc32c(data))
        whole = crc32c(data, whole)
    if whole != tensor.checksum:
        raise tensor.error("it is damaged: its checksum is another")
    return replace(source, pieces=(replace(source.pieces[0], tensor=replace(tensor, row_checksums=tuple(rows))),))
