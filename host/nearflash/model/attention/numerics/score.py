"""From an exact sum to a score."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.fixed_point import EXACT_LSB, SCORE_BITS, SCORE_LSB

__all__ = ["to_score"]

_DROP = SCORE_LSB - EXACT_LSB
_HALF_RANGE = 1 << SCORE_BITS - 1


def to_score(exact: NDArray[np.object_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Exact sums (Python integers, units of 2^EXACT_LSB) rounded to nearest even in units of 2^SCORE_LSB.

    Returns the scores (their low 36 bits, signed, where they do not fit) and whether each lies outside its format.
    """
    rounded = np.asarray(exact + (1 << _DROP - 1) - 1 + (exact >> _DROP & 1) >> _DROP)
    wrapped = np.asarray((rounded + _HALF_RANGE) % (2 * _HALF_RANGE) - _HALF_RANGE)
    return wrapped.astype(np.int64), np.asarray(wrapped != rounded).astype(np.bool_)
