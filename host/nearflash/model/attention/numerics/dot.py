"""Exact sums of fp16 values and of their products."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.fixed_point import EXACT_LSB
from nearflash.model.attention.numerics.product import Fp16, multiply_truncated

__all__ = ["dot_truncated", "exact_dot", "exact_sum"]

_FP16_LSB = -24
_LIMB_BITS = 20
_TERMS_MAX = 1 << 20  # sums of limb products, of 41 bits, then fit 63 bits


def _to_fixed(values: Fp16) -> NDArray[np.int64]:
    """fp16 values in units of 2^-24 (41 bits, signed). Raises ValueError for infinities and NaN."""
    if not np.isfinite(values).all():
        raise ValueError("fp16 values must be finite, not infinite or NaN: check with np.isfinite first")
    return np.ldexp(values.astype(np.float64), -_FP16_LSB).astype(np.int64)


def exact_dot(a: Fp16, b: Fp16) -> NDArray[np.object_]:
    """`a @ b` (np.matmul's shapes) in units of 2^EXACT_LSB, as Python integers.

    Values are split into a low limb of 20 bits and a high one, so that numpy sums their products in 64 bits: a head of
    S = 4096, d = 128 takes a few milliseconds. q·K of all tokens: exact_dot(K, q); p·V: exact_dot(p, V).

    Raises ValueError for infinities and NaN, and for sums of more than 2^20 terms.
    """
    if a.shape[-1] > _TERMS_MAX:
        raise ValueError(f"a dot product must have at most {_TERMS_MAX} terms, not {a.shape[-1]}")
    mask = (1 << _LIMB_BITS) - 1
    (a_high, a_low), (b_high, b_low) = ((v >> _LIMB_BITS, v & mask) for v in (_to_fixed(a), _to_fixed(b)))
    low = a_low @ b_low
    middle = (low >> _LIMB_BITS) + a_high @ b_low + a_low @ b_high
    high = a_high @ b_high + (middle >> _LIMB_BITS)
    below = np.asarray((middle & mask) << _LIMB_BITS | low & mask)
    return np.asarray((np.asarray(high).astype(object) << 2 * _LIMB_BITS) + below.astype(object))


def exact_sum(values: Fp16) -> NDArray[np.object_]:
    """Sum over the last axis in units of 2^EXACT_LSB, as Python integers. Raises ValueError for infinities and NaN."""
    return np.asarray(np.asarray(_to_fixed(values).sum(axis=-1)).astype(object) << _FP16_LSB - EXACT_LSB)


def dot_truncated(a: Fp16, b: Fp16) -> NDArray[np.int64]:
    """Approximate score: sum over the last axis of products cut toward zero, in units of 2^SCORE_LSB.

    Shapes broadcast: dot_truncated(K[:, dims], q[dims]) gives one score a token. The range rule is `exceeds`.
    """
    return np.asarray(multiply_truncated(a, b).sum(axis=-1))
