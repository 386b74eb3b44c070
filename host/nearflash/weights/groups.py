"""Quantised matrices without a bitmap: every element has a code, in groups of 64 columns (FlexGen, section 4.4).

    scale and minimum of each group of each row (4 bytes, in the weights' format) | codes (8 or 4 bits, a row's padded
    to whole bytes), all row-major

Numerics: code · scale + minimum, as nearflash.weights.quantize.
"""

from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import SCALE_COLUMNS, ElementFormat
from nearflash.abi.errors import ShapeError, StreamError
from nearflash.abi.topk import StreamFault
from nearflash.weights.quantize import QuantizedMatrix

__all__ = ["expand_groups", "group_bytes", "pack_groups"]

_THREAD_BYTES, _THREADED_BYTES = 1 << 20, 4 << 20
"""Dense bytes that a thread expands at once, and from which on threads are worth their start."""


def pack_groups(matrix: QuantizedMatrix) -> bytes:
    """The scales and codes of a matrix all of whose elements are present. Raises ShapeError for any other."""
    if not matrix.present.all():
        raise ShapeError("matrix must have a value everywhere, not pruned: pack it as a bitmap")
    codes = matrix.codes
    if matrix.element is ElementFormat.INT4:
        codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
        codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(matrix.scales, "<u2").tobytes() + codes.tobytes()


def expand_groups(
    data: NDArray[np.uint8], out: NDArray[Any], bits: int, output: ElementFormat, executor: Executor | None = None
) -> None:
    """Write the dense matrix to `out` (rows, columns), uint16, contiguous. Raises StreamError for another length.

    executor: as for nearflash.device.backends.host.matrix.expand_into.
    """
    from nearflash.device.backends.host.matrix import expand_pool
    from nearflash.device.backends.host.vector.rows import expand_codes
    from nearflash.support.threads import CallingThread

    rows, columns = out.shape
    scales, codes = group_bytes(len(data), rows, columns, bits)
    assert out.flags.c_contiguous
    padded = np.empty(len(data) + SCALE_COLUMNS, np.uint8)  # the last codes are read 32 at once
    padded[: len(data)] = data

    def expand(first: int, last: int) -> None:
        pairs, row_codes = padded[first * scales // rows :], padded[scales + first * codes // rows :]
        expand_codes(pairs, row_codes, bits, output, out[first:last])

    if executor is None:
        executor = CallingThread() if out.nbytes < _THREADED_BYTES else expand_pool()
    bounds = range(0, rows, max(_THREAD_BYTES * rows // out.nbytes, 1))
    jobs = [executor.submit(expand, first, min(first + bounds.step, rows)) for first in bounds]
    for job in jobs:
        job.result()


def group_bytes(stored: int, rows: int, columns: int, bits: int) -> tuple[int, int]:
    """Bytes of scales and of codes of a matrix. Raises StreamError where there are not `stored` bytes of both."""
    scales, codes = rows * -(-columns // SCALE_COLUMNS) * 4, rows * -(-columns * bits // 8)
    if stored != scales + codes:
        rule = f"a matrix of {rows} x {columns} int{bits} codes must have {scales + codes} bytes"
        raise StreamError(f"{rule}, not {stored}", StreamFault.LENGTH)
    return scales, codes
