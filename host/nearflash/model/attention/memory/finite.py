"""Values that are infinities or NaN: a fault, and then not computed with."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.faults import Fault

__all__ = ["finite"]

F16 = NDArray[np.float16]


def finite(*arrays: F16) -> tuple[list[F16], Fault]:
    """The arrays with 0 in place of what is not finite, and NONFINITE where there was some."""
    marks = [np.isfinite(array) for array in arrays]
    if all(mark.all() for mark in marks):
        return list(arrays), Fault(0)
    return [np.where(mark, array, np.float16(0)) for mark, array in zip(marks, arrays, strict=True)], Fault.NONFINITE
