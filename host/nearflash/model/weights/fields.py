"""Fields of less than a byte, and bytes and more: sections as arrays of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["join_fields", "split_fields"]


def join_fields(fields: NDArray[Any], bits: int) -> bytes:
    """Bytes of unsigned fields (n,) of 1, 2, 4, 8, 16 or 32 bits each, from the lowest bit up."""
    if bits >= 8:
        return fields.astype(f"<u{bits // 8}").tobytes()
    digits = np.unpackbits(fields.astype(np.uint8)[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(digits, bitorder="little").tobytes()


def split_fields(section: bytes, bits: int, count: int) -> NDArray[Any]:
    """The first `count` fields of a section, (count,)."""
    if bits >= 8:
        return np.frombuffer(section, f"<u{bits // 8}", count)
    digits = np.unpackbits(np.frombuffer(section, np.uint8), count=count * bits, bitorder="little").reshape(count, bits)
    return np.packbits(digits, axis=1, bitorder="little")[:, 0]
