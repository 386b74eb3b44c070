"""Index rows of index blocks, for many heads at once, with the numbers of docs/contracts/attention.md, section 1.

A quantised row: zero = the smallest element, scale = fp16((largest - smallest) / levels), code = (K - zero) / scale,
rounded to nearest even, within 0 .. levels = 2^bits - 1; where the scale is zero, codes are zero. Every step is one
IEEE 754 operation in double precision, so all platforms build the same bytes.
"""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.pages import IndexFormat, IndexLayout

__all__ = ["index_rows"]

_F16 = NDArray[np.float16]


def index_rows(k: _F16, layout: IndexLayout) -> tuple[NDArray[np.uint8], _F16]:
    """Rows (b, d, T·bits/8) of the blocks k (b, T, d), and their scale and zero, (b, d, 2); fp16: zeros."""
    if layout.format is IndexFormat.FP16:
        rows = np.ascontiguousarray(np.swapaxes(k, 1, 2)).view(np.uint8)
        return rows, np.zeros((len(k), layout.dim, 2), np.float16)
    rows = np.empty((len(k), layout.dim, layout.block_tokens * layout.format.bits // 8), np.uint8)
    factors = np.empty((len(k), layout.dim, 2), np.float16)
    for block, (row, factor) in enumerate(zip(rows, factors, strict=True)):
        row[:], factor[:, 0], factor[:, 1] = _quantise(k[block], layout.format)
    return rows, factors


def _quantise(k: _F16, form: IndexFormat) -> tuple[NDArray[np.uint8], _F16, _F16]:
    """Rows, scale and zero of one block (T, d); one at a time, so that its doubles stay in the processor's cache."""
    levels = (1 << form.bits) - 1
    with np.errstate(all="ignore"):
        steps = k.astype(np.float64)
        zero, largest = steps.min(axis=0) + 0.0, steps.max(axis=0)  # never -0
        scale = ((largest - zero) / levels).astype(np.float16)
        steps -= zero
        steps /= np.where(scale > 0, scale, np.inf).astype(np.float64)
        np.rint(steps, out=steps)
        steps[np.isnan(steps)] = 0
    codes = np.ascontiguousarray(np.clip(steps, 0, levels, out=steps).astype(np.uint8).T)
    rows = codes if form.bits == 8 else codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return rows, scale, zero.astype(np.float16)
