"""Elements with scales: FlexGen's quantisation, and the reference for the gateware's Dequantizer.

Source: FlexGen (arXiv 2303.06865), section 4.4: groups of values between their minimum and maximum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.abi.bitmap import SCALE_COLUMNS, ElementFormat
from nearflash.model.fp.convert import from_narrow, to_bf16, to_fp16

__all__ = ["ScaledMatrix", "dequantize", "quantize"]


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix of codes, the scale and minimum of each 64 columns of a row, and which elements have a value."""

    codes: NDArray[np.uint8]
    """(rows, columns)."""
    present: NDArray[np.bool_]
    """(rows, columns)."""
    scales: NDArray[np.uint16]
    """(rows, ceil(columns / 64), 2): patterns of scale and minimum in the output's format."""
    element: ElementFormat
    """INT8 or INT4."""
    output: ElementFormat
    """FP16 or BF16."""

    def dense(self) -> NDArray[np.uint16]:
        """Patterns of the dense matrix, (rows, columns)."""
        pairs = np.repeat(self.scales, SCALE_COLUMNS, axis=1)[:, : self.codes.shape[1]]
        return dequantize(self.codes, self.present, pairs[..., 0], pairs[..., 1], self.output)


def dequantize(
    codes: NDArray[np.uint8], present: ArrayLike, scale: ArrayLike, minimum: ArrayLike, output: ElementFormat
) -> NDArray[np.uint16]:
    """Patterns of code · scale + minimum where present, else +0; shapes broadcast.

    The product in fp32 is exact (infinite past its range), the sum rounds to fp32, then to the output's format, to
    nearest even. A NaN is the canonical one.
    """
    number = output.number_format
    s, m = (from_narrow(np.asarray(x, np.uint16), number).view(np.float32) for x in (scale, minimum))
    with np.errstate(all="ignore"):
        total = codes.astype(np.float32) * s + m
    patterns = to_fp16(total) if output is ElementFormat.FP16 else to_bf16(total)
    return np.where(present, patterns, np.uint16(0))


def quantize(
    matrix: NDArray[np.uint16], element: ElementFormat, output: ElementFormat, present: NDArray[np.bool_] | None = None
) -> ScaledMatrix:
    """Codes of a matrix of finite fp16 or bf16 patterns; `present`: which elements have a value (None: all but +0)."""
    present = matrix != 0 if present is None else present
    number, top = output.number_format, np.float32((1 << element.number_format.bits) - 1)
    rows, columns = matrix.shape
    padded = ((0, 0), (0, -columns % SCALE_COLUMNS))
    shape = (rows, -1, SCALE_COLUMNS)
    there = np.pad(present, padded).reshape(shape)
    values = from_narrow(np.pad(matrix, padded), number).view(np.float32).reshape(shape)
    some = there.any(axis=2)
    low = np.where(some, np.where(there, values, np.float32(np.inf)).min(axis=2), np.float32(0))
    high = np.where(some, np.where(there, values, np.float32(-np.inf)).max(axis=2), np.float32(0))
    narrow = to_fp16 if output is ElementFormat.FP16 else to_bf16
    with np.errstate(over="ignore"):
        scales = np.stack([narrow(((high - low) / top).astype(np.float32)), narrow(low)], axis=2)
    s, m = (from_narrow(scales[..., k], number).view(np.float32)[..., None] for k in range(2))
    steps = np.divide(values - m, s, out=np.zeros_like(values), where=there & (s != 0))
    codes = np.clip(np.rint(steps), 0, top).astype(np.uint8).reshape(rows, -1)[:, :columns]
    return ScaledMatrix(codes, present, scales, element, output)
