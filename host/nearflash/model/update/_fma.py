"""Exact fused multiply-add (private): rounded once through a double rounded to odd."""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32] | np.float32


def fma(a: F32, b: F32, c: F32) -> NDArray[np.float32]:
    """rn(a·b + c)."""
    product = np.asarray(np.multiply(a, b, dtype=np.float64))
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    to_odd = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, to_odd, 0)).view(np.float64).astype(np.float32)
