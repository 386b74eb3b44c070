"""fp32 square root."""

import numpy as np

from nearflash.model.fp.bits import Bits, Flags, canonical, exceptions

__all__ = ["sqrt"]


def sqrt(a: Bits) -> tuple[Bits, Flags]:
    """rn(sqrt(a)) of bit patterns, element by element, and its exceptions."""
    with np.errstate(all="ignore"):
        root = np.sqrt(a.view(np.float32))
        square = root.astype(np.float64) * root
        return canonical(root), exceptions((a,), root, inexact=square != a.view(np.float32))
