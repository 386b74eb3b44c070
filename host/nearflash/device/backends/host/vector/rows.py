"""Rows of a bitmap matrix, found and expanded by compiled loops. Format: nearflash.abi.bitmap.

Addresses are int64. A table has a line a row: the offset of its bitmap, its values, its escapes, and the offset of its
group, where the codebook is.
"""

from functools import cache
from typing import Any

import numpy as np

from nearflash.abi.bitmap import SCALE_COLUMNS, SECTION_BYTES, ElementFormat, RowFormat
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.vector.checksum import crc32c_at
from nearflash.device.backends.host.vector.chunks import (
    ALL,
    CHUNK,
    decode_bf16,
    decode_fp16,
    expand8,
    expand16,
    load64,
    popcount,
    scale_bf16,
    scale_fp16,
    split4,
)
from nearflash.device.backends.host.vector.compiled import compiled

__all__ = ["find_groups", "group_loop", "row_loop"]

_NONE, _LENGTH, _COUNT, _CHECKSUM = (
    int(fault) for fault in (StreamFault.NONE, StreamFault.LENGTH, StreamFault.COUNT, StreamFault.CHECKSUM)
)
_SECTION_BITS = 8 * SECTION_BYTES
assert SCALE_COLUMNS == 2 * CHUNK


@compiled
def _padded(bits: Any) -> Any:
    """Bytes of a section of so many bits."""
    return (bits + _SECTION_BITS - 1) // _SECTION_BITS * SECTION_BYTES


@compiled
def _lanes(count: Any) -> Any:
    """The first `count` of 32 lanes."""
    return ALL if count >= CHUNK else np.uint32((np.uint64(1) << np.uint64(count)) - np.uint64(1))


@compiled
def _low_bits(count: Any) -> Any:
    return ~np.uint64(0) if count >= 64 else (np.uint64(1) << np.uint64(count)) - np.uint64(1)


@compiled
def _bitmap_ones(address: Any, columns: Any) -> Any:
    """Ones of a row's bitmap; -1 where there are some behind its columns."""
    count, beyond = 0, np.uint64(0)
    for word in range(_padded(columns) // 8):
        bits = load64(address + 8 * word)
        count += popcount(bits)
        beyond |= bits & ~_low_bits(max(columns - 64 * word, 0))
    return count if beyond == 0 else -1


@compiled
def _escapes(address: Any, values: Any, code_bits: Any) -> Any:
    """Codes of 3 among the values'."""
    count, first = 0, np.uint64(0x5555555555555555 if code_bits == 2 else 0x1111111111111111)
    for word in range((values * code_bits + 63) // 64):
        codes = load64(address + 8 * word) & _low_bits(values * code_bits - 64 * word)
        count += popcount(codes & (codes >> np.uint64(1)) & first)
    return count


@compiled
def find_groups(base: Any, at: Any, end: Any, numbers: Any, layout: Any, bits: Any, table: Any) -> Any:
    """Fill the table of rows of groups that begin at offset `at` of the stream, and check their checksums.

    numbers: (first group, behind the last one). layout: (rows, columns, rows of a group, bytes of a codebook). bits:
    int64, of each Section, 0 where the format lacks it. Nothing at or behind offset `end` is read. Returns the fault;
    the number of its row, or of its group where it is in no row; rows found; and where it stands.
    """
    found, (rows, columns, group_rows, book_bytes) = 0, layout
    for number in range(numbers[0], numbers[1]):
        begin = at
        if at + book_bytes > end:
            return _LENGTH, number, found, at
        at += book_bytes
        for row in range(number * group_rows, min((number + 1) * group_rows, rows)):
            table[found, 0], table[found, 3] = at, begin
            if at + _padded(columns) > end:
                return _LENGTH, row, found, at
            values, escapes = _bitmap_ones(base + at, columns), 0
            at += _padded(columns)
            if values < 0:
                return _COUNT, row, found, at
            for section in range(1, 6):
                fields = values
                if section == 1:
                    fields = (columns + SCALE_COLUMNS - 1) // SCALE_COLUMNS
                elif section == 4:
                    fields = escapes
                size = _padded(fields * bits[section])
                if at + size > end:
                    return _LENGTH, row, found, at
                if section == 3:
                    escapes = _escapes(base + at, values, bits[section]) if bits[section] else 0
                at += size
            table[found, 1], table[found, 2] = values, escapes
            found += 1
        if at + SECTION_BYTES > end:
            return _LENGTH, number, found, at
        checksum = np.uint64(crc32c_at(base + begin, at - begin))
        if load64(base + at) != np.uint64(number) | checksum << np.uint64(32):
            return _CHECKSUM, number, found, at
        at += SECTION_BYTES
    return _NONE, 0, found, at


@cache
def row_loop(row_format: RowFormat, output: ElementFormat | None) -> Any:
    """The loop `expand(base, table, columns, out, row_bytes, buffer)` for rows of a format.

    base: address of the stream; table: of n rows; out: address of their first dense row, the others `row_bytes` apart,
    of which the columns are written; buffer: address of 2·columns + 64 bytes.
    """
    if output is not None:
        return _scaled_loop(scale_fp16 if output is ElementFormat.FP16 else scale_bf16, row_format is RowFormat.SCALED4)
    if row_format is RowFormat.PLAIN8:
        return _plain_loop(expand8, 1)
    if row_format is RowFormat.PLAIN16:
        return _plain_loop(expand16, 2)
    return _coded_loop(*(decode_fp16, 4, True) if row_format is RowFormat.CODED_FP16 else (decode_bf16, 2, False))


def _spreading(expand: Any, size: int) -> Any:
    """A row from its bitmap and its values, of `size` bytes."""

    @compiled
    def spread(bitmap: Any, values: Any, columns: Any, out: Any) -> None:
        for first in range(0, columns, 2 * CHUNK):
            word, left = load64(bitmap + first // 8), columns - first
            lower, upper = np.uint32(word & np.uint64(ALL)), np.uint32(word >> np.uint64(CHUNK))
            at, between = out + first * size, values + popcount(np.uint64(lower)) * size
            if left >= 2 * CHUNK:
                expand(at, values, lower, ALL)
                expand(at + CHUNK * size, between, upper, ALL)
            else:
                expand(at, values, lower, _lanes(left))
                expand(at + CHUNK * size, between, upper, _lanes(max(left - CHUNK, 0)))
            values += popcount(word) * size

    return spread


def _plain_loop(expand: Any, size: int) -> Any:
    spread = _spreading(expand, size)

    @compiled
    def loop(base: Any, table: Any, columns: Any, out: Any, row_bytes: Any, buffer: Any) -> None:
        for row in range(len(table)):
            bitmap = base + table[row, 0]
            spread(bitmap, bitmap + _padded(columns), columns, out + row * row_bytes)

    return loop


def _coded_loop(decode: Any, code_bits: int, has_low: bool) -> Any:
    spread = _spreading(expand16, 2)

    @compiled
    def loop(base: Any, table: Any, columns: Any, out: Any, row_bytes: Any, buffer: Any) -> None:
        for row in range(len(table)):
            bitmap, values = base + table[row, 0], table[row, 1]
            low = bitmap + _padded(columns)
            codes = low + (_padded(values) if has_low else 0)
            escapes = codes + _padded(values * code_bits)
            high, book = escapes + _padded(table[row, 2] * 8), base + table[row, 3]
            for first in range(0, values, CHUNK):
                escapes += decode(buffer + 2 * first, book, high + first, codes + first * code_bits // 8,
                                  low + first // 8, escapes, _lanes(values - first))  # fmt: skip
            spread(bitmap, buffer, columns, out + row * row_bytes)

    return loop


def _scaled_loop(scale: Any, joined: bool) -> Any:
    @compiled
    def loop(base: Any, table: Any, columns: Any, out: Any, row_bytes: Any, buffer: Any) -> None:
        pairs = (columns + SCALE_COLUMNS - 1) // SCALE_COLUMNS
        for row in range(len(table)):
            bitmap, at = base + table[row, 0], out + row * row_bytes
            pair = bitmap + _padded(columns)
            values = pair + _padded(pairs * 32)
            if joined:
                for first in range(0, table[row, 1], CHUNK):
                    split4(buffer + first, values + first // 2)
                values = buffer
            for first in range(0, columns, 2 * CHUNK):
                word, left = load64(bitmap + first // 8), columns - first
                lower, upper = np.uint32(word & np.uint64(ALL)), np.uint32(word >> np.uint64(CHUNK))
                scale(at + 2 * first, values, lower, _lanes(left), pair)
                between = values + popcount(np.uint64(lower))
                scale(at + 2 * (first + CHUNK), between, upper, _lanes(max(left - CHUNK, 0)), pair)
                values += popcount(word)
                pair += 4

    return loop


@cache
def group_loop(bits: int, output: ElementFormat) -> Any:
    """The loop `expand(pairs, codes, rows, columns, out, buffer)` for codes of 8 or 4 bits of every element.

    Addresses of scales and minima, codes (64 more bytes can be read behind the last), the dense rows, and 64 bytes.
    """
    scale = scale_fp16 if output is ElementFormat.FP16 else scale_bf16
    joined = bits == 4

    @compiled
    def loop(pairs: Any, codes: Any, rows: Any, columns: Any, out: Any, buffer: Any) -> None:
        row_bytes = (columns * bits + 7) // 8
        for row in range(rows):
            at = out + row * columns * 2
            for first in range(0, columns, 2 * CHUNK):
                values, left = codes + row * row_bytes + first * bits // 8, columns - first
                if joined:
                    split4(buffer, values)
                    split4(buffer + CHUNK, values + CHUNK // 2)
                    values = buffer
                scale(at + 2 * first, values, ALL, _lanes(left), pairs)
                scale(at + 2 * (first + CHUNK), values + CHUNK, ALL, _lanes(max(left - CHUNK, 0)), pairs)
                pairs += 4

    return loop
