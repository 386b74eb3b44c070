"""From a logit to the weight of a token."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.abi.attention.fixed_point import LOGIT_LSB, REFERENCE_HEADROOM
from nearflash.model.attention.numerics.exp2 import significand

__all__ = ["to_weight"]

_LARGEST = 0x7BFF


def to_weight(logit: NDArray[np.int64], reference: ArrayLike) -> tuple[NDArray[np.float16], NDArray[np.bool_]]:
    """p = 2^(logit - reference) · 2^7 in fp16, rounded to nearest even into the subnormals.

    logit: units of 2^LOGIT_LSB; reference: an integer, broadcasts. Returns the weights and whether each passes the
    largest fp16 number, which is the weight then. floor(logit) is `logit >> -LOGIT_LSB`.
    """
    sig = significand(logit & (1 << -LOGIT_LSB) - 1)
    exponent = (logit >> -LOGIT_LSB) - np.asarray(reference, np.int64) + REFERENCE_HEADROOM - 1
    normal = (exponent.clip(-14, 17) + 14 << 10) + sig
    drop = (-14 - exponent).clip(0, 12)  # of a subnormal; 12 bits leave nothing
    tiny = sig + (1 << drop >> 1) - 1 + (sig >> drop & 1) >> drop
    bits = np.where(drop > 0, tiny, normal)
    return np.minimum(bits, _LARGEST).astype(np.uint16).view(np.float16), np.asarray(bits > _LARGEST)
