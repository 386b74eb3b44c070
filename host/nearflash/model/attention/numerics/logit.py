"""From a score to a base-2 logit."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.abi.attention.fixed_point import LOGIT_BITS, LOGIT_LSB, SCALE_LEAST_LOG2, SCALE_LIMIT_LOG2, SCORE_LSB

__all__ = ["SCALE_LEAST", "SCALE_LIMIT", "to_logit"]

SCALE_LEAST, SCALE_LIMIT = 2.0**SCALE_LEAST_LOG2, 2.0**SCALE_LIMIT_LOG2
"""A scale lies in [SCALE_LEAST, SCALE_LIMIT)."""
_MOST = (1 << LOGIT_BITS - 1) - 1


def to_logit(score: NDArray[np.int64], scale: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """score · scale rounded to nearest even in units of 2^LOGIT_LSB, saturated to 28 bits.

    score: 36 bits, units of 2^SCORE_LSB; scale: positive normal fp32, broadcasts. Returns the logits and whether each
    is out of range: saturated; or its scale is outside [SCALE_LEAST, SCALE_LIMIT), and then the logit is 0.
    """
    factor = np.asarray(scale, np.float32)
    usable = (factor >= SCALE_LEAST) & (factor < SCALE_LIMIT)
    fraction, exponent = np.frexp(np.where(usable, factor, np.float32(1)))
    product = np.asarray(score, np.int64) * np.ldexp(fraction, 24).astype(np.int64)
    drop = 24 - exponent.astype(np.int64) + LOGIT_LSB - SCORE_LSB
    rounded = product + (np.int64(1) << drop - 1) - 1 + (product >> drop & 1) >> drop
    logit = np.where(usable, np.clip(rounded, -_MOST - 1, _MOST), 0)
    return logit, np.asarray(~usable | (logit != rounded))
