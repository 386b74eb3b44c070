"""From exact integers to fp32."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.formats import FP32

__all__ = ["to_fp32"]

_SIG_BITS = FP32.mantissa_bits + 1


def _nearest(value: int, lsb: int) -> float:
    magnitude = abs(value)
    drop = max(0, magnitude.bit_length() - _SIG_BITS)
    if drop:
        magnitude = magnitude + (1 << drop - 1) - 1 + (magnitude >> drop & 1) >> drop
    return math.copysign(math.ldexp(magnitude, drop + lsb), value)


def to_fp32(value: NDArray[Any], lsb: int) -> NDArray[np.float32]:
    """value · 2^lsb rounded to nearest even; value: integers of any size (Python's, or int64), 0 gives +0.

    Limits: results must be in the normal range of fp32, as every sum of the kernel is.
    """
    flat = [_nearest(int(integer), lsb) for integer in np.asarray(value).reshape(-1)]
    return np.array(flat, np.float32).reshape(np.shape(value))
