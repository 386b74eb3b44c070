"""fp32 square root."""

import numpy as np
from numpy.typing import NDArray

from nearflash.model.fp.bits import Bits, Flags, canonical, exceptions

__all__ = ["sqrt", "square_root"]


def square_root(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """rn(sqrt(x)) of fp32 values.

    By way of a double, whose second rounding changes nothing (53 >= 2 · 24 + 2): on a 32-bit ARM, NumPy's fp32 root is
    NEON's, which is wrong in a third of the values and takes subnormals for zero.

    Source: Figueroa, "When is double rounding innocuous?" (1995).
    """
    root: NDArray[np.float32] = np.sqrt(x.astype(np.float64)).astype(np.float32)
    return root


def sqrt(a: Bits) -> tuple[Bits, Flags]:
    """rn(sqrt(a)) of bit patterns, element by element, and its exceptions."""
    with np.errstate(all="ignore"):
        root = square_root(a.view(np.float32))
        square = root.astype(np.float64) * root
        return canonical(root), exceptions((a,), root, inexact=square != a.view(np.float32))
