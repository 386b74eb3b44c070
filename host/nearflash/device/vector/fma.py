"""Fused multiply-add of fp32 vectors in numpy, which has none.

The product of two fp32 numbers is exact in a double; adding the third and rounding to fp32 rounds twice, which can
differ from rounding once only where the double lies half-way between two fp32 numbers, or where the result is
subnormal. Those elements, few in real data, are found by their bits and done again through a double rounded to odd,
which is right always.

Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd"
(2008).
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["F32", "Fma"]

F32: TypeAlias = NDArray[np.float32]

SMALLEST_NORMAL = 2.0**-126
CUT_SHIFT, HALF_WAY = 64 - 29, np.iinfo(np.int64).min
"""A double's low 29 bits, moved to the top: what rounding to a normal fp32 number cuts off, and its half-way case."""


class Fma:
    """rn(a·b + c) of vectors of at most `params` elements, with the scratch for it."""

    def __init__(self, params: int) -> None:
        self._exact = np.empty(params, np.float64)
        self._cut = np.empty(params, np.int64)

    def __call__(self, a: F32, b: F32 | np.float32, c: F32 | np.float32, out: F32) -> F32:
        """a·b + c rounded once, into `out`, which is none of the operands; (n,), b and c may be scalars."""
        exact, cut = self._exact[: out.size], self._cut[: out.size]
        np.multiply(a, b, out=exact, dtype=np.float64)
        np.add(exact, c, out=exact)
        np.copyto(out, exact, casting="same_kind")
        np.left_shift(exact.view(np.int64), CUT_SHIFT, out=cut)
        # NaN makes the minimum NaN: then every element is looked at.
        if cut.min() == HALF_WAY or not np.abs(out).min() > SMALLEST_NORMAL:
            again = np.flatnonzero((cut == HALF_WAY) | ((np.abs(exact) < SMALLEST_NORMAL) & (exact != 0)))
            out[again] = _fma_to_odd(*(np.broadcast_to(x, out.shape)[again] for x in (a, b, c)))
        return out


def _fma_to_odd(a: F32, b: F32, c: F32) -> F32:
    """rn(a·b + c) of finite operands, through the exact error of the double sum."""
    product, addend = np.multiply(a, b, dtype=np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    up = np.where((error > 0) == (total > 0), 1, -1)
    odd: NDArray[np.int64] = np.where((error != 0) & (bits & 1 == 0), bits + up, bits)
    return odd.view(np.float64).astype(np.float32)
