"""Bitmap matrices, row by row: the reference for the gateware's expander and its parser.

Format and faults: nearflash.abi.bitmap. An element counts as zero where all its bits are: -0 is kept as a value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    CODEBOOK_ENTRIES,
    ESCAPE,
    GROUP_END,
    GROUP_END_BYTES,
    HEADER_BYTES,
    SCALE_COLUMNS,
    SECTION_BYTES,
    SECTIONS,
    BitmapHeader,
    Coding,
    ElementFormat,
    Section,
    bitmap_error,
    pack_group_end,
    section_bytes,
    section_fields,
)
from nearflash.abi.crc import crc32c
from nearflash.abi.topk import StreamFault
from nearflash.model.weights.coded import codebook, decode, encode
from nearflash.model.weights.dequantize import ScaledMatrix, dequantize
from nearflash.model.weights.fields import join_fields, split_fields

__all__ = ["Row", "expand", "expand_row", "pack", "pack_scaled", "read_rows"]

Fields = Mapping[Section, NDArray[Any]]


@dataclass(frozen=True)
class Row:
    """Row number `number`, as arrays of the fields of each of its sections, and its group's codebook, if any."""

    number: int
    fields: Fields
    codebook: bytes

    @property
    def present(self) -> NDArray[np.bool_]:
        """Which columns have a value, (columns,)."""
        return self.fields[Section.BITMAP].astype(bool)


def pack(matrix: NDArray[Any], element: ElementFormat, group_rows: int, coding: Coding = Coding.PLAIN) -> bytes:
    """Stream of a matrix of bit patterns, uint16 or uint8, (rows, columns)."""
    number, groups = element.number_format, []
    rows, columns = matrix.shape
    for first in range(0, rows, group_rows):
        group, book = matrix[first : first + group_rows], b""
        if coding is Coding.EXPONENTS:
            book = codebook(group[group != 0], number)
        values = [row[row != 0] for row in group]
        planes = [encode(row_planes, book, number) if book else {Section.VALUES: row_planes} for row_planes in values]
        groups.append(
            (book, [{Section.BITMAP: row != 0, **row_planes} for row, row_planes in zip(group, planes, strict=True)])
        )
    return _pack(BitmapHeader(element, rows, columns, group_rows, 0, coding), groups)


def pack_scaled(matrix: ScaledMatrix, group_rows: int) -> bytes:
    """Stream of a matrix of codes with scales."""
    fields: list[Fields] = [
        {
            Section.BITMAP: present,
            Section.SCALES: scales[:, 0] | scales[:, 1].astype(np.uint32) << np.uint32(16),
            Section.VALUES: codes[present],
        }
        for present, scales, codes in zip(matrix.present, matrix.scales, matrix.codes, strict=True)
    ]
    groups = [(b"", fields[first : first + group_rows]) for first in range(0, len(fields), group_rows)]
    rows, columns = matrix.codes.shape
    return _pack(BitmapHeader(matrix.element, rows, columns, group_rows, 0, output=matrix.output), groups)


def _pack(header: BitmapHeader, groups: Sequence[tuple[bytes, Sequence[Fields]]]) -> bytes:
    """Stream of groups: codebook, and the fields of each row; the header's bytes and checksum of ends do not count."""
    text = ends = b""
    bits = SECTIONS[header.row_format]
    for number, (book, fields) in enumerate(groups):
        body = _pad(book) + b"".join(_pad(join_fields(row[name], bits[name])) for row in fields for name in bits)
        end = pack_group_end(number, crc32c(body), len(body))
        text, ends = text + body + end, ends + end[:GROUP_END_BYTES]
    return replace(header, stream_bytes=HEADER_BYTES + len(text), ends_crc32c=crc32c(ends)).pack() + text


def read_rows(stream: bytes) -> Iterator[Row]:
    """Rows of a matrix, each as soon as it was read. Raises StreamError for the first fault in stream order."""
    header = BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream))
    reader = _Reader(stream, header)
    for group in range(header.groups):
        begin = reader.at
        book = reader.take(SECTION_BYTES)[:CODEBOOK_ENTRIES] if header.coding is Coding.EXPONENTS else b""
        for number in range(group * header.group_rows, min(header.rows, (group + 1) * header.group_rows)):
            yield Row(number, reader.row(number), book)
        end = reader.at
        if GROUP_END.unpack(reader.take(SECTION_BYTES)) != (group, crc32c(stream[begin:end])):
            raise bitmap_error(StreamFault.CHECKSUM, f"another one in group {group}")
    if reader.at != len(stream):
        raise bitmap_error(StreamFault.LENGTH, f"{reader.at} bytes of {len(stream)}")


class _Reader:
    """Takes sections from a stream, one behind the other."""

    def __init__(self, stream: bytes, header: BitmapHeader) -> None:
        self.stream, self.header, self.at = stream, header, HEADER_BYTES

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if self.at + size > len(self.stream):
            raise bitmap_error(StreamFault.LENGTH, f"at byte {self.at}")
        self.at += size
        return self.stream[self.at - size : self.at]

    def row(self, number: int) -> dict[Section, NDArray[Any]]:
        """Fields of the next row, which has this number."""
        columns, values, escapes = self.header.columns, 0, 0
        fields: dict[Section, NDArray[Any]] = {}
        for section, bits in SECTIONS[self.header.row_format].items():
            count = section_fields(section, columns, values, escapes)
            data = self.take(section_bytes(bits * count))
            fields[section] = split_fields(data, bits, count)
            if section is Section.BITMAP:
                values = int(fields[section].sum())
                if np.unpackbits(np.frombuffer(data, np.uint8)).sum() != values:
                    raise bitmap_error(StreamFault.COUNT, f"ones behind column {columns - 1} of row {number}")
            elif section is Section.CODES:
                escapes = int(np.count_nonzero(fields[section] & 3 == ESCAPE))
        return fields


def expand(stream: bytes) -> NDArray[Any]:
    """Matrix of bit patterns, uint16 or uint8, (rows, columns). Raises StreamError."""
    header = BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream))
    return np.stack([_dense(header, row) for row in read_rows(stream)])


def _dense(header: BitmapHeader, row: Row) -> NDArray[Any]:
    values = row.fields[Section.VALUES]
    if header.coding is Coding.EXPONENTS:
        values = decode(row.fields, row.codebook, header.element.number_format)
    dense = np.zeros(header.columns, values.dtype)
    dense[row.present] = values
    if header.output is None:
        return dense
    pairs = np.repeat(row.fields[Section.SCALES], SCALE_COLUMNS)[: header.columns]
    return dequantize(dense, row.present, pairs & 0xFFFF, pairs >> 16, header.output)


def expand_row(bitmap: bytes, values: bytes, columns: int, dtype: Any) -> NDArray[Any]:
    """Elements (columns,) of a row, from the bytes of its bitmap and of its values."""
    present = split_fields(bitmap, 1, columns).astype(bool)
    row = np.zeros(columns, dtype)
    row[present] = np.frombuffer(values, dtype)[: int(present.sum())]
    return row


def _pad(section: bytes) -> bytes:
    return section.ljust(section_bytes(8 * len(section)), b"\0")
