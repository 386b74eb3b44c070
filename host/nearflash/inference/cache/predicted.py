"""Queries of a layer as the layer before predicts them: its attention's input, by this layer's own projection.

    layer i - 1: hidden states h ─► attention          layer i: h ─► its W_q, norms, rotation ─► predicted queries

Hidden states change little from a layer to the next, so that what a layer will read can be chosen, and its reads
begun, before its own queries are there. Source: InfiniGen (arXiv 2406.19707), KVSwap (arXiv 2511.11907).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from nearflash.abi.errors import UnsupportedError
from nearflash.weights.layers import decoder_layers

__all__ = ["RECORD", "check_predictions", "predict_for_engines", "predict_queries"]

RECORD = "record_queries"
"""Option of an attention function that, where it is not None, is called with the query alone."""


class _Recorded(Exception):
    """Ends a layer's attention when its queries are there."""

    def __init__(self, query: Tensor) -> None:
        super().__init__()
        self.query = query


@contextmanager
def predict_queries(model: Any) -> Iterator[None]:
    """Inside of the block the model's attention function gets `predicted`, (batch, heads, t, d), None in its first
    layer. The function must call RECORD. Raises UnsupportedError for layers without `self_attn`.
    """
    check_predictions(model)
    watch = _Watch()
    with ExitStack() as hooks:
        for number, attention in enumerate(_attentions(model)):
            seen = watch.next if number else watch.first
            hooks.callback(attention.register_forward_pre_hook(seen, with_kwargs=True).remove)
        yield


def check_predictions(model: Any) -> None:
    """Raise UnsupportedError for a model whose layers' attention is not found."""
    if any(not isinstance(attention, nn.Module) for attention in _attentions(model)):
        raise UnsupportedError("layers must have their attention as self_attn to predict queries from the layer before")


def predict_for_engines(model: Any) -> None:
    """From now on engines that take predictions (Engine.predict) get them in decode, where the model's attention has a
    cache that keeps K and V in one; at most once for a model.
    """
    try:
        attentions = _attentions(model)
    except UnsupportedError:  # of a model whose layers are not found: an engine that needs them is what says so
        return
    for attention in attentions:
        if isinstance(attention, nn.Module) and _predict_here not in attention._forward_pre_hooks.values():
            attention.register_forward_pre_hook(_predict_here, with_kwargs=True)


def _attentions(model: Any) -> list[Any]:
    return [getattr(layer, "self_attn", None) for layer in decoder_layers(model)[1]]


def _predict_here(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Predict a layer's queries of one token from what the layer before attended with."""
    cache: Any = options.get("past_key_values")
    hidden = args[0] if args else options["hidden_states"]
    if not getattr(cache, "takes_predictions", False) or hidden.shape[1] != 1:
        return
    before = cache.exchange_states(module.layer_idx, hidden)
    if before is not None:
        others = {name: value for name, value in options.items() if name != "hidden_states"}
        cache.predict(module.layer_idx, _queries(module, before, args[1:], others))


class _Watch:
    """Hidden states that the last attention was called with."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def first(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._before = args[0] if args else options["hidden_states"]

    def next(
        self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        before = self._before
        self.first(module, args, options)
        assert before is not None
        others = {name: value for name, value in options.items() if name != "hidden_states"}
        return args, options | {"predicted": _queries(module, before, args[1:], others)}


def _queries(module: nn.Module, hidden: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Queries that an attention makes of hidden states, its keys and values left out of any cache."""

    def record(query: Tensor) -> None:
        raise _Recorded(query)

    try:
        module.forward(hidden, *args, **options | {"past_key_values": None, RECORD: record})
    except _Recorded as recorded:
        return recorded.query
    raise UnsupportedError(f"{type(module).__name__} must call the attention that is registered, which has its queries")
