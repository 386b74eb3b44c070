"""fp32 sum."""

import numpy as np

from nearflash.model.fp.bits import Bits, Flags, canonical, exceptions

__all__ = ["add"]


def add(a: Bits, b: Bits) -> tuple[Bits, Flags]:
    """rn(a + b) of bit patterns, element by element, and its exceptions."""
    with np.errstate(all="ignore"):
        total = a.view(np.float32) + b.view(np.float32)
        wide_a, wide_b = (x.view(np.float32).astype(np.float64) for x in (a, b))
        wide = wide_a + wide_b
        back = wide - wide_a
        error = (wide_a - (wide - back)) + (wide_b - back)  # TwoSum: wide + error is exact
        return canonical(total), exceptions((a, b), total, inexact=(wide != total) | (error != 0))
