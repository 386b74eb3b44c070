"""2 to the power of a fraction."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.exp2 import EXP2_FRACTION_BITS, EXP2_SEGMENTS_LOG2, exp2_table

__all__ = ["significand"]

_TABLE = np.array(exp2_table(), np.int64)
_STEP_BITS = 16 - EXP2_SEGMENTS_LOG2


def significand(fraction: NDArray[np.int64]) -> NDArray[np.int64]:
    """2^(fraction / 2^16) · 1024, rounded: 1024 to 2048, at most 0.52 from the exact value; fraction: 16 bits."""
    constant, slope = np.moveaxis(_TABLE[fraction >> _STEP_BITS], -1, 0)
    return np.asarray(constant + slope * (fraction & (1 << _STEP_BITS) - 1) >> EXP2_FRACTION_BITS)
