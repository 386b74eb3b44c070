"""Matrices of weights packed as bitmaps and values: lossless, any sparsity pattern.

A row is a bitmap of the elements that are not zero and their values; the values of fp16 and bf16 may be split into
coded exponents and the other bits. Equals nearflash.model.weights.bitmap.pack to the byte; whole groups of rows are
computed at once. Layout: nearflash.abi.bitmap, docs/contracts/weights.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    CODEBOOK_ENTRIES,
    ESCAPE,
    GROUP_END_BYTES,
    HEADER_BYTES,
    SECTION_BYTES,
    SECTIONS,
    BitmapHeader,
    Coding,
    ElementFormat,
    Section,
    pack_group_end,
)
from nearflash.abi.errors import CommandError, FormatError
from nearflash.abi.formats import BF16, NumberFormat
from nearflash.weights.arrays import patterns
from nearflash.weights.quantize import QuantizedMatrix

__all__ = ["pack"]

Fields = dict[Section, tuple[NDArray[Any], NDArray[np.int64]]]
"""Of each section of a group: the fields of all rows one after another, and how many fields each row has."""
_SECTION_BITS = 8 * SECTION_BYTES
_CODINGS = {"exponents": Coding.EXPONENTS, "plain": Coding.PLAIN}


def pack(matrix: NDArray[Any] | QuantizedMatrix, *, coding: str | None = None, group_rows: int = 16) -> bytes:
    """A matrix (rows, columns) as the bytes that the `expand` kernel reads; nothing is rounded.

    matrix: an array of float16, int8 or uint8, or of bf16 (the dtype of ml_dtypes, or its patterns in uint16), or what
    `quantize` gives. Elements whose bits are all zero take no room beside their bit in the bitmap; -0 is a value.
    coding: of the values, `exponents` (default where the elements are fp16 or bf16) or `plain`.
    group_rows: rows that share a checksum and a table of exponents.

    Raises FormatError for another dtype, or coded exponents of integers; ShapeError for another shape or `group_rows`
    below 1; CommandError for a coding that does not exist.
    """
    if coding is not None and coding not in _CODINGS:
        raise CommandError(f"coding must be one of {', '.join(_CODINGS)}, not {coding!r}")
    if isinstance(matrix, QuantizedMatrix):
        codes, element, output = matrix.codes, matrix.element, matrix.output
    else:
        (codes, element), output = patterns(matrix), None
    integers = element in (ElementFormat.INT8, ElementFormat.INT4)
    if integers and coding == "exponents":
        raise FormatError(f"coding must be 'plain' for {element.name.lower()}, which has no exponents, not {coding!r}")
    chosen = _CODINGS[coding or ("plain" if integers else "exponents")]
    rows, columns = codes.shape
    header = BitmapHeader(element, rows, columns, group_rows, 0, chosen, output)
    groups = [
        _group(number, *_fields(matrix, codes[first : first + group_rows], first, header), header)
        for number, first in enumerate(range(0, rows, group_rows))
    ]
    ends = b"".join(group[-SECTION_BYTES:][:GROUP_END_BYTES] for group in groups)
    size = HEADER_BYTES + sum(map(len, groups))
    return b"".join([replace(header, stream_bytes=size, ends_crc32c=crc32c(ends)).pack(), *groups])


def _fields(
    matrix: NDArray[Any] | QuantizedMatrix, group: NDArray[Any], first: int, header: BitmapHeader
) -> tuple[bytes, Fields]:
    """A group's table of exponents, if any, and its fields."""
    rows, book = len(group), b""
    present = matrix.present[first : first + rows] if isinstance(matrix, QuantizedMatrix) else group != 0
    counts, values = np.count_nonzero(present, axis=1), group[present]
    fields: Fields = {Section.BITMAP: (present.reshape(-1).view(np.uint8), _each(rows, header.columns))}
    if isinstance(matrix, QuantizedMatrix):
        pairs = np.ascontiguousarray(matrix.scales[first : first + rows], "<u2").view("<u4")
        fields[Section.SCALES] = pairs.reshape(-1), _each(rows, pairs.shape[1])
    if header.coding is Coding.PLAIN:
        return book, fields | {Section.VALUES: (values, counts)}
    number = header.element.number_format
    exponents = (values >> number.mantissa_bits & ((1 << number.exponent_bits) - 1)).astype(np.uint8)
    book = _codebook(exponents)
    return book.ljust(SECTION_BYTES, b"\0"), fields | _planes(values, exponents, book, counts, number)


def _each(rows: int, count: int) -> NDArray[np.int64]:
    return np.full(rows, count, np.int64)


def _codebook(exponents: NDArray[np.uint8]) -> bytes:
    """The most frequent exponents, the lower first where they are equally many, 0 where there are fewer."""
    counts = np.bincount(exponents, minlength=256)
    order = np.argsort(-counts, kind="stable")[:CODEBOOK_ENTRIES]
    return bytes(int(exponent) if counts[exponent] else 0 for exponent in order)


def _planes(
    values: NDArray[Any], exponents: NDArray[np.uint8], book: bytes, counts: NDArray[np.int64], number: NumberFormat
) -> Fields:
    """The code of each exponent, the exponents without a code, and the other bits of the values."""
    codes_of = np.full(256, ESCAPE, np.uint8)
    for code in reversed(range(CODEBOOK_ENTRIES)):  # of equal entries the first counts
        codes_of[book[code]] = code
    codes = codes_of[exponents]
    escaped = codes == ESCAPE
    ends = np.concatenate([[0], np.cumsum(escaped)])[np.concatenate([[0], np.cumsum(counts)])]
    fields: Fields = {Section.ESCAPES: (exponents[escaped], np.diff(ends))}
    dropped = 0 if number is BF16 else 3
    if dropped:
        low = values.astype(np.uint8)
        fields[Section.LOW] = low & 1, counts
        codes |= (low >> 1 & 3) << 2
    fields[Section.CODES] = codes, counts
    fields[Section.VALUES] = (values >> 15 << 7 | values >> dropped & 127).astype(np.uint8), counts
    return fields


def _group(number: int, book: bytes, fields: Fields, header: BitmapHeader) -> bytes:
    """Bytes of a group: its rows' sections in order, each padded, and the checksum."""
    bits = SECTIONS[header.row_format]
    sections = [_row_sections(*fields[section], bits[section]) for section in bits]
    body = book + b"".join(data for row in zip(*sections, strict=True) for data in row)
    return body + pack_group_end(number, crc32c(body), len(body))


def _row_sections(fields: NDArray[Any], counts: NDArray[np.int64], bits: int) -> Iterator[memoryview]:
    """The bytes of one section of each row."""
    unit = _SECTION_BITS // bits
    sizes = -(-counts // unit) * unit
    ends, starts = np.cumsum(counts), np.cumsum(sizes) - sizes
    if np.array_equal(sizes, counts):
        aligned = fields
    else:
        aligned = np.zeros(int(sizes.sum()), fields.dtype)
        for start, end, count in zip(starts.tolist(), ends.tolist(), counts.tolist(), strict=True):
            aligned[start : start + count] = fields[end - count : end]
    text = _join_fields(aligned, bits).data.cast("B") if aligned.size else memoryview(b"")
    for start, size in zip((starts * bits // 8).tolist(), (sizes * bits // 8).tolist(), strict=True):
        yield text[start : start + size]


def _join_fields(fields: NDArray[Any], bits: int) -> NDArray[Any]:
    """Fields of less than a byte joined, from the lowest bit up; wider ones as little-endian bytes."""
    if bits >= 8:
        return np.ascontiguousarray(fields, f"<u{bits // 8}")
    if bits == 1:
        return np.packbits(fields, bitorder="little")
    parts = fields.astype(np.uint8, copy=False).reshape(-1, 8 // bits)
    joined = parts[:, 0].copy()
    for number in range(1, 8 // bits):
        joined |= parts[:, number] << np.uint8(number * bits)
    return joined
