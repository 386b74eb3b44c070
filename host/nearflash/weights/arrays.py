"""Matrices of weights as numpy arrays: which element format an array has, and its bit patterns."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.errors import FormatError, ShapeError

__all__ = ["patterns", "values"]

_FORMATS = {
    "float16": ElementFormat.FP16,
    "bfloat16": ElementFormat.BF16,
    "uint16": ElementFormat.BF16,
    "int8": ElementFormat.INT8,
    "uint8": ElementFormat.INT8,
}


def patterns(matrix: NDArray[Any]) -> tuple[NDArray[Any], ElementFormat]:
    """Bit patterns, uint16 or uint8, of a matrix (rows, columns), and its element format.

    The array is of float16, int8 or uint8, or of bf16: the dtype of ml_dtypes, or uint16 patterns. Raises FormatError
    for another dtype, ShapeError unless there are two dimensions and at least one element.
    """
    element = _FORMATS.get(matrix.dtype.name)
    if element is None:
        raise FormatError(
            f"matrix must be of float16, bfloat16, uint16 (patterns of bf16), int8 or uint8, not of {matrix.dtype}"
        )
    if matrix.ndim != 2 or not matrix.size:
        raise ShapeError(f"matrix must have the shape (rows, columns), both at least 1, not {matrix.shape}")
    return np.ascontiguousarray(matrix).view(f"<u{matrix.dtype.itemsize}"), element


def values(matrix: NDArray[Any], element: ElementFormat) -> NDArray[Any]:
    """Bit patterns as what they are: float16, int8, or for bf16, which numpy lacks, the patterns in uint16."""
    if element is ElementFormat.FP16:
        return matrix.view(np.float16)
    return matrix.view(np.int8) if element is ElementFormat.INT8 else matrix
