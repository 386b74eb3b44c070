"""Queries of a layer as the layer before predicts them: its attention's input, by this layer's own projection.

    layer i - 1: hidden states h ─► attention          layer i: h ─► its W_q, norms, rotation ─► predicted queries

Hidden states change little from a layer to the next, so that what a layer will read can be chosen, and its reads
begun, before its own queries are there. Source: InfiniGen (arXiv 2406.19707), KVSwap (arXiv 2511.11907).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

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

    A layer's are made a layer early, where both are on flash and the layer's weights are in memory then.
    """
    try:
        attentions = _attentions(model)
    except UnsupportedError:  # of a model whose layers are not found: an engine that needs them is what says so
        return
    for attention, after in zip(attentions, [*attentions[1:], None], strict=True):
        if isinstance(attention, nn.Module) and not any(
            isinstance(hook, _Predictor) for hook in attention._forward_pre_hooks.values()
        ):
            attention.register_forward_pre_hook(_Predictor(after), with_kwargs=True)


def _attentions(model: Any) -> list[Any]:
    return [getattr(layer, "self_attn", None) for layer in decoder_layers(model)[1]]


class _Predictor:
    """The hook of an attention; after: the next layer's, None in the last one."""

    def __init__(self, after: nn.Module | None) -> None:
        self._after = after

    def __call__(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = args[0] if args else options["hidden_states"]
        cache: Any = options.get("past_key_values")
        if not getattr(cache, "takes_predictions", False) or hidden.shape[1] != 1:
            return
        own, after = cast(int, module.layer_idx), self._after
        others = {name: value for name, value in options.items() if name != "hidden_states"}
        before = cache.exchange_states(own, hidden)
        if before is not None:
            cache.predict(own, _queries(module, before, args[1:], others))
        if isinstance(after, nn.Module) and cache.are_on_flash(own, own + 1) and _is_in_memory(after):
            cache.predict(own + 1, _queries(after, hidden, args[1:], others))
            cache.exchange_states(None, None)  # the next layer has its queries


def _is_in_memory(module: nn.Module) -> bool:
    return not any(parameter.is_meta for parameter in module.parameters())


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
