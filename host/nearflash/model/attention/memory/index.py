"""The quantised index: an unsigned code for each element of K, a scale and a zero for each channel of a block.

K[t, c] is near zero[c] + scale[c]·code[t, c]. zero is the smallest element, scale = fp16((largest - smallest) /
levels), code = (K - zero) / scale rounded to nearest even and held in 0 .. levels; levels = 2^bits - 1. A row whose
scale is zero has codes of zero. All steps are IEEE 754 operations in double precision, each rounded alone, so every
platform builds the same index.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import FormatError

__all__ = ["IndexBlock", "QuantisedBlock", "quantise"]


@dataclass(frozen=True)
class QuantisedBlock:
    """Index of one block of T tokens and d dims."""

    codes: NDArray[np.uint8]
    """(T, d), one code an element."""
    scale: NDArray[np.float16]
    """(d,)."""
    zero: NDArray[np.float16]
    """(d,)."""
    format: IndexFormat
    """INT8 or INT4."""

    def rows(self) -> NDArray[np.uint8]:
        """Bytes of the rows, (d, T·bits/8); of two int4 codes the earlier token's is the low nibble."""
        rows = np.ascontiguousarray(self.codes.T)
        return rows if self.format is IndexFormat.INT8 else rows[:, 0::2] | rows[:, 1::2] << np.uint8(4)


IndexBlock = NDArray[np.float16] | QuantisedBlock
"""A block of the index: K itself, (T, d), in the fp16 index."""


def quantise(k: NDArray[np.float16], form: IndexFormat) -> QuantisedBlock:
    """The index of a block's K, (T, d) fp16, in int8 or int4. Infinities and NaNs pass into scale and zero.

    Raises FormatError for the fp16 index, which is K itself.
    """
    if form is IndexFormat.FP16:
        raise FormatError("index format must be INT8 or INT4 to quantise, not FP16")
    levels = (1 << form.bits) - 1
    with np.errstate(all="ignore"):
        zero = k.min(axis=0) + np.float16(0)  # never -0
        scale = ((k.max(axis=0).astype(np.float64) - zero) / levels).astype(np.float16)
        steps = np.rint((k.astype(np.float64) - zero) / np.where(scale > 0, scale, np.inf).astype(np.float64))
    codes = np.clip(np.nan_to_num(steps, nan=0.0), 0, levels).astype(np.uint8)
    return QuantisedBlock(codes, scale, zero, form)
