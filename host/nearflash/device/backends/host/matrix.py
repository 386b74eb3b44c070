"""Bitmap matrices on the host, row by row: what the device `host` of the expand kernel computes.

Format and faults: nearflash.abi.bitmap. Equals nearflash.model.weights.bitmap.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    CODEBOOK_ENTRIES,
    ESCAPE,
    GROUP_END,
    HEADER_BYTES,
    SCALE_COLUMNS,
    SECTION_BYTES,
    SECTIONS,
    BitmapHeader,
    Coding,
    ElementFormat,
    Section,
    bitmap_error,
    section_bytes,
    section_fields,
)
from nearflash.abi.formats import BF16, FP16, NumberFormat
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.bf16 import bf16_patterns, bf16_values

__all__ = ["read_dense_rows"]

Bytes = NDArray[np.uint8]
Fields = dict[Section, NDArray[Any]]


def read_dense_rows(stream: Bytes) -> Iterator[tuple[NDArray[Any], int]]:
    """Dense rows of bit patterns, uint16 or uint8, each with the number of its values. Raises StreamError."""
    header = BitmapHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    at = HEADER_BYTES
    for group in range(header.groups):
        begin, book = at, np.zeros(0, np.uint8)
        if header.coding is Coding.EXPONENTS:
            book, at = _take(stream, at, SECTION_BYTES)
        for number in range(group * header.group_rows, min(header.rows, (group + 1) * header.group_rows)):
            fields, at = _read_row(stream, at, header, number)
            yield _dense(fields, header, book[:CODEBOOK_ENTRIES]), fields[Section.VALUES].size
        body = stream[begin:at]
        end, at = _take(stream, at, SECTION_BYTES)
        if GROUP_END.unpack(end.tobytes()) != (group, _checksum(body)):
            raise bitmap_error(StreamFault.CHECKSUM, f"another one in group {group}")
    if at != stream.size:
        raise bitmap_error(StreamFault.LENGTH, f"{at} bytes of {stream.size}")


def _take(stream: Bytes, at: int, size: int) -> tuple[Bytes, int]:
    if at + size > stream.size:
        raise bitmap_error(StreamFault.LENGTH, f"at byte {at}")
    return stream[at : at + size], at + size


def _read_row(stream: Bytes, at: int, header: BitmapHeader, number: int) -> tuple[Fields, int]:
    """Fields of each section; the bitmap's as booleans."""
    fields: Fields = {}
    values = escapes = 0
    for section, bits in SECTIONS[header.row_format].items():
        count = section_fields(section, header.columns, values, escapes)
        data, at = _take(stream, at, section_bytes(bits * count))
        if section is Section.BITMAP:
            there = np.unpackbits(data, bitorder="little").view(np.bool_)
            fields[section], values = there[:count], int(np.count_nonzero(there[:count]))
            if there[count:].any():
                raise bitmap_error(StreamFault.COUNT, f"ones behind column {count - 1} of row {number}")
        else:
            fields[section] = _split(data, bits)[:count]
        if section is Section.CODES:
            escapes = int(np.count_nonzero(fields[section] & 3 == ESCAPE))
    return fields, at


def _split(data: Bytes, bits: int) -> NDArray[Any]:
    """Fields of so many bits, from the lowest bit of each byte up."""
    if bits >= 8:
        return data.view(f"<u{bits // 8}")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (data[:, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(-1)


def _dense(fields: Fields, header: BitmapHeader, book: Bytes) -> NDArray[Any]:
    there, values = fields[Section.BITMAP], fields[Section.VALUES]
    if header.coding is Coding.EXPONENTS:
        values = _decoded(fields, book, header.element.number_format)
    elif header.output is not None:
        values = _scaled(fields, header.output)
    row = np.zeros(header.columns, values.dtype)
    row[there] = values
    return row


def _decoded(fields: Fields, book: Bytes, number: NumberFormat) -> NDArray[np.uint16]:
    """Values (n,) of planes."""
    codes, high = fields[Section.CODES], fields[Section.VALUES].astype(np.uint16)
    exponents = np.append(book, np.uint8(0)).astype(np.uint16)[codes & 3]
    exponents[codes & 3 == ESCAPE] = fields[Section.ESCAPES]
    exponents &= np.uint16((1 << number.exponent_bits) - 1)
    significand = high & 127
    if number is FP16:
        significand = significand << 3 | (codes >> 2).astype(np.uint16) << 1 | fields[Section.LOW]
    decoded: NDArray[np.uint16] = high >> 7 << 15 | exponents << number.mantissa_bits | significand
    return decoded


def _scaled(fields: Fields, output: ElementFormat) -> NDArray[np.uint16]:
    """Values (n,) of codes, with the scale and the minimum of their columns."""
    groups = np.flatnonzero(fields[Section.BITMAP]) // SCALE_COLUMNS
    pairs = fields[Section.SCALES].view("<u2").reshape(-1, 2)
    wide = pairs.view(np.float16).astype(np.float32) if output is ElementFormat.FP16 else bf16_values(pairs)
    with np.errstate(all="ignore"):
        sums = fields[Section.VALUES].astype(np.float32) * wide[groups, 0] + wide[groups, 1]
        if output is ElementFormat.FP16:
            patterns = sums.astype(np.float16).view(np.uint16)
        else:
            patterns = bf16_patterns(sums).astype(np.uint16)
    canonical = FP16.canonical_nan if output is ElementFormat.FP16 else BF16.canonical_nan
    return np.where(np.isnan(sums), np.uint16(canonical), patterns)


def _checksum(body: Bytes) -> int:
    from crc32c import crc32c  # not for boards, which check matrices themselves

    return int(crc32c(body.tobytes()))
