"""Coded weights, block by block: the reference of what expands them. Format and faults: nearflash.abi.coded."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import GROUP_END, HEADER_BYTES, SECTION_BYTES, bitmap_error, section_bytes
from nearflash.abi.coded import LEVELS, CodedHeader, CodedSection
from nearflash.abi.crc import crc32c
from nearflash.abi.topk import StreamFault
from nearflash.model.weights.fields import split_fields

__all__ = ["expand_levels"]


def expand_levels(stream: bytes) -> NDArray[np.uint16]:
    """Patterns (elements,) of coded weights. Raises StreamError for the first fault in stream order."""
    header = CodedHeader.unpack(stream[:HEADER_BYTES], len(stream))
    reader, left = _Stream(stream), header.elements
    parts: list[NDArray[np.uint16]] = []
    for group in range(header.groups):
        begin, book = reader.at, list(reader.take(SECTION_BYTES)[: header.codebook_entries])
        for _ in range(header.group_blocks):
            if left:
                elements = min(left, header.block_elements)
                parts.append(_expand_block(reader, header, book, elements, len(parts)))
                left -= elements
        end = reader.at
        if GROUP_END.unpack(reader.take(SECTION_BYTES)) != (group, crc32c(stream[begin:end])):
            raise bitmap_error(StreamFault.CHECKSUM, f"another one in group {group}", header.what)
    if reader.at != len(stream):
        raise bitmap_error(StreamFault.LENGTH, f"{reader.at} bytes of {len(stream)}", header.what)
    return np.concatenate(parts)


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
) -> NDArray[np.uint16]:
    """Patterns of a block: each value's codes are followed from level to level."""
    present = np.ones(elements, bool)
    if header.has_bitmap:
        data = reader.take(section_bytes(elements))
        present = split_fields(data, 1, elements).astype(bool)
        if np.unpackbits(np.frombuffer(data, np.uint8)).sum() != present.sum():
            raise bitmap_error(StreamFault.COUNT, f"ones behind the last element of block {number}", header.what)
    sections, values = header.sections, int(present.sum())
    codes: list[list[int]] = []
    count = values
    for level in LEVELS:
        codes.append(reader.take_fields(sections[level], count).tolist())
        count = codes[-1].count((1 << sections[level]) - 1)
    codes.append(reader.take_fields(sections[CodedSection.ESCAPES], count).tolist())
    rest = {section: reader.take_fields(bits, values).astype(np.uint16)
            for section, bits in sections.items() if section > CodedSection.ESCAPES}  # fmt: skip
    queues = [iter(level) for level in codes]
    lasts = [(1 << sections[level]) - 1 for level in LEVELS]
    exponents = np.array([_follow(queues, lasts, book) for _ in range(values)], np.uint16)
    fields = header.element.number_format
    high = rest[CodedSection.VALUES]
    significand = high & 127
    if CodedSection.LOW in rest:
        significand = significand << 3 | rest[CodedSection.MIDDLE] << 1 | rest[CodedSection.LOW]
    exponents &= (1 << fields.exponent_bits) - 1
    dense = np.zeros(elements, np.uint16)
    dense[present] = high >> 7 << 15 | exponents << fields.mantissa_bits | significand
    return dense


def _follow(queues: list[Iterator[int]], lasts: list[int], book: list[int]) -> int:
    """The exponent of the next value: the first code that is not its level's last one says which."""
    entry = 0
    for queue, last in zip(queues, lasts, strict=False):
        code = next(queue)
        if code < last:
            return book[entry + int(code)]
        entry += last
    return int(next(queues[-1]))
