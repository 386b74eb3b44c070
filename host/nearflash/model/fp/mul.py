"""fp32 product."""

import numpy as np

from nearflash.model.fp.bits import Bits, Flags, canonical, exceptions, tiny_below

__all__ = ["mul"]


def mul(a: Bits, b: Bits) -> tuple[Bits, Flags]:
    """rn(a * b) of bit patterns, element by element, and its exceptions."""
    with np.errstate(all="ignore"):
        product = a.view(np.float32) * b.view(np.float32)
        exact = a.view(np.float32).astype(np.float64) * b.view(np.float32)
        flags = exceptions((a, b), product, inexact=exact != product, tiny=np.abs(exact) < tiny_below())
        return canonical(product), flags
