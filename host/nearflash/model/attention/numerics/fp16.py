"""From integers to fp16, and the order of fp16 numbers as integers."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["order_key", "to_fp16"]


def to_fp16(value: NDArray[np.int64], lsb: int) -> NDArray[np.float16]:
    """value · 2^lsb rounded to nearest even; infinite past fp16. |value| at most 2^53, so that a double holds it."""
    with np.errstate(over="ignore"):
        return np.ldexp(value.astype(np.float64), lsb).astype(np.float16)


def order_key(value: NDArray[np.float16]) -> NDArray[np.uint16]:
    """Keys that compare as unsigned integers as the numbers do; -0 counts as +0. NaN has no place."""
    bits = value.view(np.uint16)
    bits = np.where(bits == 0x8000, np.uint16(0), bits)
    return np.where(bits & 0x8000 != 0, ~bits, bits | np.uint16(0x8000)).astype(np.uint16)
