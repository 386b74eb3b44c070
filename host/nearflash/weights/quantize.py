"""Matrices of int8 or int4 codes with a scale and a minimum for each 64 columns of a row.

Numerics: value = code * scale + minimum, as nearflash.model.weights.dequantize to the bit. Source: FlexGen (arXiv
2303.06865), section 4.4.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import SCALE_COLUMNS, ElementFormat
from nearflash.abi.errors import CommandError, FormatError, NonFiniteError, ShapeError
from nearflash.device.backends.host.bf16 import bf16_patterns, bf16_values
from nearflash.weights.arrays import patterns

__all__ = ["QuantizedMatrix", "quantize"]

_BITS = {8: ElementFormat.INT8, 4: ElementFormat.INT4}


@dataclass(frozen=True)
class QuantizedMatrix:
    """Codes of a matrix, the scale and minimum of each 64 columns of a row, and which elements have a value."""

    codes: NDArray[np.uint8]
    """(rows, columns), unsigned."""
    present: NDArray[np.bool_]
    """(rows, columns): elements that have a value; every other one expands to +0."""
    scales: NDArray[np.uint16]
    """(rows, ceil(columns / 64), 2): bit patterns of scale and minimum, in the format of the weights."""
    element: ElementFormat
    """INT8 or INT4."""
    output: ElementFormat
    """Format of the weights, FP16 or BF16."""


def quantize(matrix: NDArray[Any], bits: int, *, present: NDArray[np.bool_] | None = None) -> QuantizedMatrix:
    """Codes of 4 or 8 bits of a matrix (rows, columns) of fp16 or bf16 (bf16 also as uint16 patterns).

    present: (rows, columns), the elements that have a value; by default all but +0. Packing what comes back is
    lossless; quantising is not.

    Raises FormatError for another dtype, ShapeError for another shape, CommandError for other bits, NonFiniteError for
    NaN or infinity.
    """
    codes, output = patterns(matrix)
    if bits not in _BITS:
        raise CommandError(f"bits must be 4 or 8, not {bits!r}")
    if output is ElementFormat.INT8:
        raise FormatError(f"matrix must be of fp16 or bf16 to be quantised, not of {matrix.dtype}")
    present = codes != 0 if present is None else present
    if present.shape != codes.shape or present.dtype != np.bool_:
        raise ShapeError(
            f"present must be booleans of the shape {codes.shape}, not {present.dtype} of the shape {present.shape}"
        )
    wide = _wide(codes, output)
    if not np.isfinite(wide[present]).all():
        raise NonFiniteError("matrix must be finite, not NaN or infinite: no scale can hold such a value")
    return _quantize(wide, present, _BITS[bits], output)


def _quantize(
    values: NDArray[np.float32], present: NDArray[np.bool_], element: ElementFormat, output: ElementFormat
) -> QuantizedMatrix:
    (rows, columns), top = values.shape, np.float32((1 << element.number_format.bits) - 1)
    padding = ((0, 0), (0, -columns % SCALE_COLUMNS))
    there = np.pad(present, padding).reshape(rows, -1, SCALE_COLUMNS)
    grouped = np.pad(values, padding).reshape(there.shape)
    filled = there.any(axis=2)
    low = np.where(filled, np.where(there, grouped, np.float32(np.inf)).min(axis=2), np.float32(0))
    high = np.where(filled, np.where(there, grouped, np.float32(-np.inf)).max(axis=2), np.float32(0))
    step = ((high - low) / top).astype(np.float32)
    scales = np.stack([_narrow(step, output), _narrow(low, output)], axis=2)
    scale, minimum = (_wide(scales[..., part], output)[..., None] for part in range(2))
    steps = np.divide(grouped - minimum, scale, out=np.zeros_like(grouped), where=there & (scale != 0))
    codes = np.clip(np.rint(steps), 0, top).astype(np.uint8).reshape(rows, -1)[:, :columns]
    return QuantizedMatrix(codes, present, scales, element, output)


def _wide(found: NDArray[np.uint16], output: ElementFormat) -> NDArray[np.float32]:
    return found.view(np.float16).astype(np.float32) if output is ElementFormat.FP16 else bf16_values(found)


def _narrow(values: NDArray[np.float32], output: ElementFormat) -> NDArray[np.uint16]:
    """Rounded to nearest even; past the range of fp16, infinite."""
    if output is ElementFormat.BF16:
        return bf16_patterns(np.ascontiguousarray(values)).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)
