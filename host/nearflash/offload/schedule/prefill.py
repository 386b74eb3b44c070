"""A layer's prefill of a large batch, some sequences at a time: what it needs beside weights is that of a part.

Decode is fastest in large batches, and FlexGen's are as large as there is room for in prefill, of all sequences at
once. Here prefill's memory grows with the batch by its hidden states and its KV cache alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearflash.offload.cache.kv_cache import TieredLayer
from nearflash.offload.schedule.fiber import Call
from nearflash.planning.policy import prefill_tokens

__all__ = ["compute_layer"]

_BY_SEQUENCE = ("attention_mask", "position_ids")
"""Arguments that have a row for each sequence where they are matrices."""


def compute_layer(call: Call, cache: TieredLayer | None, split: bool = True) -> Any:
    """Compute a layer; in parts of its batch where `split` allows it and there is a cache that takes parts.

    A call with an argument of which it is not certain whether it has a row for each sequence is computed at once, and
    one with a table that layers share.
    """
    states = call.hidden_states
    if not split or cache is None or states is None or states.dim() != 3:
        return call.compute()
    sequences, tokens = states.shape[:2]
    size = max(1, prefill_tokens(sequences, tokens) // tokens)
    if size == sequences or not all(_certain(argument, name, states) for name, argument in _arguments(call)):
        return call.compute()
    joined: Any = None
    for start in range(0, sequences, size):
        rows = slice(start, min(start + size, sequences))
        args = tuple(_rows_of(argument, rows, None, states) for argument in call.args)
        kwargs = {name: _rows_of(argument, rows, name, states) for name, argument in call.kwargs.items()}
        with cache.part(rows):
            value = replace(call, args=args, kwargs=kwargs).compute()
        joined = _join(joined, value, rows, sequences)
    return joined


def _arguments(call: Call) -> Iterator[tuple[str | None, Any]]:
    yield from ((None, value) for value in call.args)
    yield from call.kwargs.items()


def _has_rows(value: Tensor, name: str | None, states: Tensor) -> bool:
    """Whether a tensor has a row for each sequence."""
    sequences, tokens = states.shape[:2]
    if value.dim() < 2 or value.shape[0] != sequences:
        return False
    if value.dim() == 2:
        return name in _BY_SEQUENCE
    return value.shape[-2] == tokens and (value.dim() == 3 or value.shape[1] != sequences)


def _certain(value: Any, name: str | None, states: Tensor) -> bool:
    if isinstance(value, Tensor):
        unlike = value.dim() < 2 or value.shape[0] != states.shape[0] or states.shape[0] == states.shape[1]
        return unlike or _has_rows(value, name, states)
    if isinstance(value, list | tuple):
        return all(_certain(item, None, states) for item in value)
    return not isinstance(value, Mapping)


def _rows_of(value: Any, rows: slice, name: str | None, states: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if _has_rows(value, name, states) else value
    if isinstance(value, list | tuple):
        return type(value)(_rows_of(item, rows, None, states) for item in value)
    return value


def _join(joined: Any, value: Any, rows: slice, sequences: int) -> Any:
    """Put a part's tensors into those of the batch, which are made at the first part."""
    if isinstance(value, tuple | list):
        parts = [None] * len(value) if joined is None else joined
        return type(value)(_join(part, item, rows, sequences) for part, item in zip(parts, value, strict=True))
    if not isinstance(value, Tensor):
        return value
    rows_each = value.shape[0] // (rows.stop - rows.start)  # rows of a sequence: tokens where they are flat
    if joined is None:
        joined = torch.empty((sequences * rows_each, *value.shape[1:]), dtype=value.dtype, device=value.device)
    joined[rows.start * rows_each : rows.stop * rows_each] = value
    return joined
