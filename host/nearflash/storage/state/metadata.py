"""Metadata of a state, beside its arrays: plain values of the training script and of the optimizer, kept as JSON.

What JSON itself would change has a tag, so that it comes back equal and of its own kind: a dict with one key, TAG,
whose value begins with the kind.

    {1: "a"} -> {"$nearflash": ["dict", [[1, "a"]]]}        (1, 2) -> {"$nearflash": ["tuple", [1, 2]]}
"""

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nearflash.abi.errors import FormatError, StateError

__all__ = ["METADATA_BYTES", "TAG", "decode_metadata", "encode_metadata"]

METADATA_BYTES = 64 << 10
"""Room for `metadata`, as JSON, in the checksum table of each slot: a scaler, a scheduler, generators' states."""
TAG = "$nearflash"
DEPTH = 100
"""Values within values, at most: what reads a table may be deep in calls already."""


def encode_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON has them. Raises FormatError for what would not come back, or is longer than METADATA_BYTES.

    None, bool, int, float, str, list, dict, tuple, set, frozenset, Counter, deque, bytes and numpy's scalars and arrays
    come back as they were; of other kinds of dict and list, equal ones.
    """
    if not isinstance(metadata, Mapping):
        raise FormatError(f"metadata must be a dict, not {metadata!r}")
    body: dict[str, Any] = _of_dict("metadata", metadata, 0)
    try:
        text = json.dumps(body, allow_nan=False)
    except (TypeError, ValueError) as error:  # an integer with more digits than Python converts
        raise FormatError(f"metadata must be values that JSON can have, not what fails with: {error}") from error
    if len(text) > METADATA_BYTES:
        raise FormatError(
            f"metadata must fit {METADATA_BYTES} bytes of JSON, not {len(text)}; keep large values elsewhere"
        )
    return body


def decode_metadata(body: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `encode_metadata`. Raises StateError for what that does not give."""
    try:
        values = _decode(dict(body))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise StateError(
            f"metadata of a state must be as it was written ({error!r}); restore it from a copy"
        ) from error
    if not isinstance(values, dict):
        raise StateError("metadata of a state must be a dict; restore the state from a copy")
    return values


def _encode(place: str, value: Any, depth: int) -> Any:
    """The JSON of a value, which messages call `place`."""
    if depth > DEPTH:
        raise FormatError(f"metadata must be at most {DEPTH} values deep, without circles; {place[:60]}… is deeper")
    kind = _kind(value)
    if kind is None:
        raise FormatError(
            f"{place} must be a plain value, not a {type(value).__name__}: give a tensor as tensor.numpy(), of others "
            "numbers, strings, lists and dicts"
        )
    return _ENCODE[kind](place, value, depth + 1)


def _kind(value: Any) -> str | None:
    """Key of _ENCODE; None for what is not kept."""
    if isinstance(value, np.generic | np.ndarray):
        return "numpy" if value.dtype.kind in "biufcSU" and value.dtype.names is None else None
    for kind, types in _TYPES.items():
        if isinstance(value, types):
            return kind
    return None


_TYPES: dict[str, tuple[type, ...]] = {
    "plain": (bool, int, str, type(None)),
    "float": (float,),
    "counter": (Counter,),
    "dict": (dict,),
    "tuple": (tuple,),
    "list": (list,),
    "set": (set,),
    "frozenset": (frozenset,),
    "deque": (deque,),
    "bytes": (bytes,),
}


def _items(place: str, values: Any, depth: int) -> list[Any]:
    return [_encode(f"{place}[{index}]", value, depth) for index, value in enumerate(values)]


def _pairs(place: str, values: Mapping[Any, Any], depth: int) -> list[Any]:
    return [
        [_encode(f"a key of {place}", key, depth), _encode(f"{place}[{key!r}]", value, depth)]
        for key, value in values.items()
    ]


def _of_dict(place: str, values: Mapping[Any, Any], depth: int) -> Any:
    if all(type(key) is str for key in values) and TAG not in values:
        return {key: _encode(f"{place}[{key!r}]", value, depth) for key, value in values.items()}
    return {TAG: ["dict", _pairs(place, values, depth)]}


def _of_float(_: str, value: float, __: int) -> Any:
    number = float(value)
    return number if math.isfinite(number) else {TAG: ["float", str(number)]}


def _of_numpy(_: str, value: Any, __: int) -> Any:
    return {TAG: ["numpy", value.dtype.str, isinstance(value, np.generic), list(value.shape), value.tobytes().hex()]}


_ENCODE: dict[str, Callable[[str, Any, int], Any]] = {
    "plain": lambda _, value, __: value,
    "float": _of_float,
    "numpy": _of_numpy,
    "dict": _of_dict,
    "list": _items,
    "bytes": lambda _, value, __: {TAG: ["bytes", value.hex()]},
    "counter": lambda place, value, depth: {TAG: ["counter", _pairs(place, value, depth)]},
    "deque": lambda place, value, depth: {TAG: ["deque", value.maxlen, _items(place, value, depth)]},
    **{
        kind: lambda place, value, depth, kind=kind: {TAG: [kind, _items(place, value, depth)]}  # type: ignore[misc]
        for kind in ("tuple", "set", "frozenset")
    },
}


def _decode(body: Any) -> Any:
    if isinstance(body, list):
        return [_decode(item) for item in body]
    if not isinstance(body, dict):
        return body
    if TAG not in body:
        return {key: _decode(value) for key, value in body.items()}
    kind, *values = body[TAG]
    return _DECODE[kind](*values)


def _from_numpy(dtype: str, scalar: bool, shape: list[int], data: str) -> Any:
    values = np.frombuffer(bytes.fromhex(data), np.dtype(dtype)).reshape(shape)
    return values[()] if scalar else values.copy()


_DECODE: dict[str, Callable[..., Any]] = {
    "dict": lambda pairs: {_decode(key): _decode(value) for key, value in pairs},
    "counter": lambda pairs: Counter({_decode(key): _decode(value) for key, value in pairs}),
    "tuple": lambda values: tuple(map(_decode, values)),
    "set": lambda values: set(map(_decode, values)),
    "frozenset": lambda values: frozenset(map(_decode, values)),
    "deque": lambda maxlen, values: deque(map(_decode, values), maxlen),
    "float": float,
    "bytes": bytes.fromhex,
    "numpy": _from_numpy,
}
