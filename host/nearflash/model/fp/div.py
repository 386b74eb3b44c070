"""fp32 quotient."""

import numpy as np

from nearflash.model.fp.bits import Bits, Flags, canonical, exceptions, tiny_below

__all__ = ["div"]


def div(a: Bits, b: Bits) -> tuple[Bits, Flags]:
    """rn(a / b) of bit patterns, element by element, and its exceptions."""
    x, y = a.view(np.float32), b.view(np.float32)
    with np.errstate(all="ignore"):
        quotient = x / y
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        flags = exceptions(
            (a, b),
            quotient,
            inexact=quotient * wide_y != wide_x,
            tiny=np.abs(wide_x) < tiny_below() * np.abs(wide_y),
            div_by_zero=(y == 0) & (x != 0) & np.isfinite(x),
        )
        return canonical(quotient), flags
