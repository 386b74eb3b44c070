"""One tensor compressed for a file of weights: folded to rows that waste no padding, in its smallest form.

Few columns waste room, since each section of a row is padded to 64 bytes: 576 take 128 bytes of bitmap and not 72.
Several rows of such a matrix become one of the stream, which the tensor's shape in the metadata undoes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import SCALE_COLUMNS, ElementFormat
from nearflash.abi.errors import CommandError, FormatError, NonFiniteError
from nearflash.weights.arrays import patterns
from nearflash.weights.coded import pack_coded
from nearflash.weights.expand import ELEMENTS
from nearflash.weights.file import PackedTensor
from nearflash.weights.groups import pack_groups
from nearflash.weights.pack import pack
from nearflash.weights.quantize import quantize
from nearflash.weights.rans import pack_rans

__all__ = ["BITS", "FORMATS", "compress_bytes", "compress_tensor", "dense_tensor", "fold_shape"]

FORMATS = ("coded-bitmap", "bitmap", "coded", "groups")
"""A bitmap and values, as `expand` kernels take them, their exponents coded where that is smaller, or not; exponents
coded in levels, with a bitmap where there are zeros; and, for 8 or 4 bits only, codes without a bitmap."""
BITS = (16, 8, 4)
_DTYPES = {element: dtype for dtype, element in ELEMENTS.items()}
_COLUMNS = 16384
"""Most columns of a folded row: every `expand` build for boards takes them."""
_GROUP_BYTES = 1 << 20
"""Dense bytes of a group of rows, about: a reader's thread has enough to do with one."""


def compress_tensor(name: str, values: NDArray[Any], format: str = FORMATS[0], bits: int = 16) -> PackedTensor:
    """A tensor of two dimensions or more, fp16 or bf16 (uint16 patterns), in the smallest of the forms asked for.

    format: one of FORMATS; bits: 16 is lossless, 8 and 4 quantise (coded: as bitmap). Zeros stay zeros, but in codes
    without a bitmap, which a tensor gets that is smaller so. One that no form makes smaller stays dense.
    Raises CommandError for other options, FormatError for another dtype, NonFiniteError where a scale cannot hold one.
    """
    if format not in FORMATS or bits not in BITS:
        raise CommandError(f"format must be one of {', '.join(FORMATS)} and bits one of 16, 8, 4, not {format}, {bits}")
    if format == "groups" and bits == 16:
        raise CommandError("bits must be 8 or 4 with the format groups, not 16")
    codes, element = patterns(values.reshape(-1, values.shape[-1]))
    if element is ElementFormat.INT8 and bits != 16:
        raise FormatError(f"tensor {name!r} must be of fp16 or bf16 to be quantised, not of {values.dtype}")
    dense = PackedTensor(
        name, _DTYPES[element], values.shape, "dense", np.ascontiguousarray(codes).view(np.uint8).ravel()
    )
    rows, columns = codes.shape
    matrix = values.reshape(fold_shape(rows, columns, 1 if bits == 16 else SCALE_COLUMNS))
    try:
        packed = [PackedTensor(name, dense.dtype, values.shape, form, np.frombuffer(data, np.uint8))
                  for form, data in _forms(matrix, format, bits)]  # fmt: skip
    except NonFiniteError as error:
        raise NonFiniteError(f"tensor {name!r}: {error}") from None
    return min([*packed, *([dense] if bits == 16 else [])], key=lambda each: len(each.data))


def _forms(matrix: NDArray[Any], format: str, bits: int) -> Iterator[tuple[str, bytes]]:
    group_rows = max(_GROUP_BYTES // matrix[:1].nbytes, 1)
    if bits == 16:
        if format == "coded" and matrix.dtype.itemsize == 2:
            coded = pack_coded(matrix)
            yield "coded", coded
            if len(coded) <= matrix.size // 8 + np.count_nonzero(matrix.view(np.uint16)) * matrix.dtype.itemsize:
                return  # a bitmap and values are no less
        yield "bitmap", pack(matrix, coding="plain", group_rows=group_rows)
        if format == "coded-bitmap" and matrix.dtype.itemsize == 2:
            yield "bitmap", pack(matrix, coding="exponents", group_rows=group_rows)
        return
    if format != "groups":
        yield "bitmap", pack(quantize(matrix, bits), group_rows=group_rows)
    yield f"int{bits}", pack_groups(quantize(matrix, bits, present=np.ones(matrix.shape, bool)))


def compress_bytes(name: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> PackedTensor:
    """A tensor of one of BYTE_DTYPES, losslessly coded where that is smaller, else dense."""
    dense = dense_tensor(name, dtype, shape, data)
    packed = PackedTensor(name, dtype, shape, "rans", np.frombuffer(pack_rans(data), np.uint8))
    return min(packed, dense, key=lambda each: len(each.data))


def dense_tensor(name: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> PackedTensor:
    """A tensor that stays as it is, of any dtype of safetensors."""
    return PackedTensor(name, dtype, shape, "dense", data)


def fold_shape(rows: int, columns: int, step: int = 1) -> tuple[int, int]:
    """Shape of the stream's matrix: as many rows joined as divide `rows` and have 16,384 columns at most.

    Columns are a multiple of `step` already, or nothing is joined: rows that share a scale must not meet in one.
    """
    most = max(_COLUMNS // columns, 1) if columns % step == 0 else 1
    joined = max(count for count in range(1, min(most, rows) + 1) if rows % count == 0)
    return rows // joined, columns * joined
