"""Bitmap matrices, row by row: the reference for the gateware's expander and its parser.

Format and faults: nearflash.abi.bitmap. An element counts as zero where all its bits are: -0 is kept as a value.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    GROUP_END,
    HEADER_BYTES,
    SECTION_BYTES,
    BitmapHeader,
    ElementFormat,
    bitmap_error,
    section_bytes,
)
from nearflash.abi.crc import crc32c
from nearflash.abi.topk import StreamFault

__all__ = ["expand", "expand_row", "pack"]


def pack(matrix: NDArray[Any], element: ElementFormat, group_rows: int) -> bytes:
    """Stream of a matrix of bit patterns, uint16 or uint8, (rows, columns)."""
    groups = []
    for number, first in enumerate(range(0, len(matrix), group_rows)):
        body = b"".join(_padded(bits) for row in matrix[first : first + group_rows] for bits in _sections(row))
        groups.append(body + GROUP_END.pack(number, crc32c(body)))
    text, (rows, columns) = b"".join(groups), matrix.shape
    return BitmapHeader(element, rows, columns, group_rows, HEADER_BYTES + len(text)).pack() + text


def expand(stream: bytes) -> NDArray[Any]:
    """Matrix of bit patterns, uint16 or uint8, (rows, columns). Raises StreamError."""
    header = BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream))
    bits = header.element.number_format.bits
    matrix = np.zeros((header.rows, header.columns), f"<u{bits // 8}")
    at = HEADER_BYTES
    for number in range(header.groups):
        begin = at
        for row in range(number * header.group_rows, min(header.rows, (number + 1) * header.group_rows)):
            values_at = at + section_bytes(header.columns)
            count = int(np.unpackbits(np.frombuffer(stream[at:values_at], np.uint8))[: 8 * (values_at - at)].sum())
            end = values_at + section_bytes(count * bits)
            if end + SECTION_BYTES > len(stream):
                raise bitmap_error(StreamFault.LENGTH, f"in row {row}")
            matrix[row] = expand_row(stream[at:values_at], stream[values_at:end], header.columns, matrix.dtype)
            at = end
        if GROUP_END.unpack_from(stream, at) != (number, crc32c(stream[begin:at])):
            raise bitmap_error(StreamFault.CHECKSUM, f"another one in group {number}")
        at += SECTION_BYTES
    if at != len(stream):
        raise bitmap_error(StreamFault.LENGTH, f"{at} bytes of {len(stream)}")
    return matrix


def expand_row(bitmap: bytes, values: bytes, columns: int, dtype: Any) -> NDArray[Any]:
    """Elements (columns,) of a row, from the bytes of its bitmap and of its values."""
    present = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[:columns].astype(bool)
    row = np.zeros(columns, dtype)
    row[present] = np.frombuffer(values, dtype)[: int(present.sum())]
    return row


def _sections(row: NDArray[Any]) -> tuple[bytes, bytes]:
    return np.packbits(row != 0, bitorder="little").tobytes(), row[row != 0].tobytes()


def _padded(section: bytes) -> bytes:
    return section.ljust(section_bytes(8 * len(section)), b"\0")
