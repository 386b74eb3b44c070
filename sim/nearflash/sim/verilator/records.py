"""Items of structs as numpy columns: what a stream of the gateware carries, field by field."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from amaranth.lib import data
from numpy.typing import ArrayLike, NDArray

__all__ = ["pack", "unpack"]


def pack(shape: Any, columns: Mapping[str, ArrayLike]) -> NDArray[np.uint32]:
    """Rows of uint32 words, low first, of a struct wider than 64 bits; fields that are not named are zero.

    Fields are at most 64 bits wide. Raises ValueError for a field that the struct does not have, or values beyond it.
    """
    layout = data.Layout.cast(shape)
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(column, np.uint64)) for column in columns.values()))
    count = len(arrays[0]) if arrays else 1
    bits = np.zeros((count, -(-layout.size // 32) * 32), np.uint8)
    for name, array in zip(columns, arrays, strict=True):
        field = _field(layout, name)
        if field.width < 64 and (array >> np.uint64(field.width)).any():
            raise ValueError(f"{name} must fit {field.width} bits, not {array.max()}")
        column = np.unpackbits(np.ascontiguousarray(array).view(np.uint8).reshape(count, 8), axis=1, bitorder="little")
        bits[:, field.offset : field.offset + field.width] = column[:, : field.width]
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def unpack(shape: Any, words: NDArray[np.uint32]) -> dict[str, NDArray[np.uint64]]:
    """The fields of at most 64 bits of such rows, by name."""
    layout = data.Layout.cast(shape)
    bits = np.unpackbits(np.ascontiguousarray(words, np.uint32).view(np.uint8), axis=1, bitorder="little")
    fields = {}
    for name, field in layout:
        if field.width <= 64:
            column = np.zeros((len(words), 64), np.uint8)
            column[:, : field.width] = bits[:, field.offset : field.offset + field.width]
            fields[name] = np.packbits(column, axis=1, bitorder="little").view(np.uint64).reshape(-1)
    return fields


def _field(layout: data.Layout, name: str) -> data.Field:
    names = [key for key, _ in layout]
    if name not in names:
        raise ValueError(f"field must be one of {', '.join(map(str, names))}, not {name!r}")
    return layout[name]
