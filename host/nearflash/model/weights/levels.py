"""Coded weights, block by block: the reference of what expands them. Format and faults: nearflash.abi.coded."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    GROUP_END,
    GROUP_END_BYTES,
    HEADER_BYTES,
    SECTION_BYTES,
    ElementFormat,
    bitmap_error,
    pack_group_end,
    section_bytes,
)
from nearflash.abi.coded import LEVELS, CodedHeader, CodedSection, level_bits
from nearflash.abi.crc import crc32c
from nearflash.abi.topk import StreamFault
from nearflash.model.weights.fields import join_fields, split_fields

__all__ = ["expand_levels", "join_values", "pack_levels", "read_blocks"]


def expand_levels(stream: bytes) -> NDArray[np.uint16]:
    """Patterns (elements,) of coded weights. Raises StreamError for the first fault in stream order."""
    return np.concatenate([dense for dense, _ in read_blocks(stream)])


def read_blocks(stream: bytes) -> Iterator[tuple[NDArray[np.uint16], int]]:
    """Patterns (elements,) of each block, and how many of them have a value. Raises StreamError, in stream order."""
    header = CodedHeader.unpack(stream[:HEADER_BYTES], len(stream))
    reader, left, number = _Stream(stream), header.elements, 0
    for group in range(header.groups):
        begin, book = reader.at, list(reader.take(SECTION_BYTES)[: header.codebook_entries])
        for _ in range(min(header.group_blocks, header.blocks - number)):
            elements = min(left, header.block_elements)
            yield _expand_block(reader, header, book, elements, number)
            left, number = left - elements, number + 1
        end = reader.at
        if GROUP_END.unpack(reader.take(SECTION_BYTES)) != (group, crc32c(stream[begin:end])):
            raise bitmap_error(StreamFault.CHECKSUM, f"another one in group {group}", header.what)
    if reader.at != len(stream):
        raise bitmap_error(StreamFault.LENGTH, f"{reader.at} bytes of {len(stream)}", header.what)


def pack_levels(
    words: NDArray[np.uint16], element: ElementFormat, code_bits: int, has_bitmap: bool,
    block_elements: int, group_blocks: int = 4,
) -> bytes:  # fmt: skip
    """Coded weights of patterns (elements,), of any values and choice of codes: for tests of what expands them."""
    header = CodedHeader(element, code_bits, has_bitmap, words.size, block_elements, group_blocks, 0)
    size, groups = block_elements * group_blocks, list[bytes]()
    for first in range(0, words.size, size):
        body = _pack_group(words[first : first + size], header)
        groups.append(body + pack_group_end(len(groups), crc32c(body), len(body)))
    ends = b"".join(group[-SECTION_BYTES:][:GROUP_END_BYTES] for group in groups)
    stream_bytes = HEADER_BYTES + sum(map(len, groups))
    return b"".join([replace(header, stream_bytes=stream_bytes, ends_crc32c=crc32c(ends)).pack(), *groups])


def _pack_group(words: NDArray[np.uint16], header: CodedHeader) -> bytes:
    number = header.element.number_format
    exponents = words >> number.mantissa_bits & ((1 << number.exponent_bits) - 1)
    counts = np.bincount(exponents[words != 0] if header.has_bitmap else exponents, minlength=256)
    book = np.argsort(-counts, kind="stable")[: header.codebook_entries]
    book[counts[book] == 0] = 0
    ranks = np.full(256, header.codebook_entries)
    ranks[book[::-1]] = np.arange(book.size)[::-1]  # of equal entries the first counts
    body = bytes(book.tolist()).ljust(SECTION_BYTES, b"\0")
    for first in range(0, words.size, header.block_elements):
        body += _pack_block(words[first : first + header.block_elements], ranks, header)
    return body


def _pack_block(words: NDArray[np.uint16], ranks: NDArray[Any], header: CodedHeader) -> bytes:
    number = header.element.number_format
    values = words[words != 0] if header.has_bitmap else words
    exponents = values >> number.mantissa_bits & ((1 << number.exponent_bits) - 1)
    fields: dict[CodedSection, NDArray[Any]] = {CodedSection.BITMAP: words != 0}
    ranked, escaped = ranks[exponents], exponents
    for level, bits in zip(LEVELS, level_bits(header.code_bits), strict=True):
        last = (1 << bits) - 1
        fields[level], deeper = np.minimum(ranked, last), ranked >= last
        ranked, escaped = ranked[deeper] - last, escaped[deeper]
    dropped = number.mantissa_bits - 7
    fields |= {CodedSection.ESCAPES: escaped, CodedSection.LOW: values & 1, CodedSection.MIDDLE: values >> 1 & 3,
               CodedSection.VALUES: values >> 15 << 7 | values >> dropped & 127}  # fmt: skip
    sections = (join_fields(fields[section], bits) for section, bits in header.sections.items())
    return b"".join(text.ljust(section_bytes(8 * len(text)), b"\0") for text in sections)


class _Stream:
    """Takes sections from a stream, one behind the other."""

    def __init__(self, stream: bytes) -> None:
        self._stream, self.at = stream, HEADER_BYTES

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if self.at + size > len(self._stream):
            raise bitmap_error(StreamFault.LENGTH, f"at byte {self.at}", CodedHeader.what)
        self.at += size
        return self._stream[self.at - size : self.at]

    def take_fields(self, bits: int, count: int) -> NDArray[Any]:
        """The next section, of `count` fields."""
        return split_fields(self.take(section_bytes(bits * count)), bits, count)


def _expand_block(
    reader: _Stream, header: CodedHeader, book: list[int], elements: int, number: int
) -> tuple[NDArray[np.uint16], int]:
    """Patterns of a block, and how many have a value."""
    present = np.ones(elements, bool)
    if header.has_bitmap:
        data = reader.take(section_bytes(elements))
        present = split_fields(data, 1, elements).astype(bool)
        if np.unpackbits(np.frombuffer(data, np.uint8)).sum() != present.sum():
            raise bitmap_error(StreamFault.COUNT, f"ones behind the last element of block {number}", header.what)
    sections, values = header.sections, int(present.sum())
    fields: dict[CodedSection, NDArray[Any]] = {}
    count = values
    for level in LEVELS:
        fields[level] = reader.take_fields(sections[level], count)
        count = int(np.count_nonzero(fields[level] == (1 << sections[level]) - 1))
    fields[CodedSection.ESCAPES] = reader.take_fields(sections[CodedSection.ESCAPES], count)
    for section, bits in sections.items():
        if section > CodedSection.ESCAPES:
            fields[section] = reader.take_fields(bits, values)
    dense = np.zeros(elements, np.uint16)
    dense[present] = join_values(fields, book, header.element, header.code_bits)
    return dense, values


def join_values(
    fields: Mapping[CodedSection, NDArray[Any]], book: list[int], element: ElementFormat, code_bits: int
) -> NDArray[np.uint16]:
    """Patterns (values,) of a block's sections, each an array of fields, and its group's codebook."""
    queues = [iter(fields[section].tolist()) for section in (*LEVELS, CodedSection.ESCAPES)]
    lasts = [(1 << bits) - 1 for bits in level_bits(code_bits)]
    high, number = fields[CodedSection.VALUES].astype(np.uint16), element.number_format
    exponents = np.array([_follow(queues, lasts, book) for _ in range(high.size)], np.uint16)
    significand = high & 127
    if element is ElementFormat.FP16:
        low, middle = (fields[section].astype(np.uint16) for section in (CodedSection.LOW, CodedSection.MIDDLE))
        significand = significand << 3 | middle << 1 | low
    exponents &= (1 << number.exponent_bits) - 1
    values: NDArray[Any] = high >> 7 << 15 | exponents << number.mantissa_bits | significand
    return values


def _follow(queues: list[Iterator[int]], lasts: list[int], book: list[int]) -> int:
    """The exponent of the next value: the first code that is not its level's last one says which."""
    entry = 0
    for queue, last in zip(queues, lasts, strict=False):
        code = next(queue)
        if code < last:
            return book[entry + int(code)]
        entry += last
    return int(next(queues[-1]))
