"""Weights packed with coded exponents, losslessly, pruned or not; and expanded by the host's cores.

Format: nearflash.abi.coded. The codes of a group are chosen for it; whether there is a bitmap, and bits of the first
code, by what makes the tensor smallest.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    GROUP_END_BYTES,
    HEADER_BYTES,
    SECTION_BYTES,
    ElementFormat,
    bitmap_error,
    check_groups,
    pack_group_end,
    section_bytes,
)
from nearflash.abi.coded import LEVELS, CodedHeader, CodedSection
from nearflash.abi.errors import FormatError
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.matrix import expand_pool
from nearflash.device.backends.host.vector.coded import TABLE_COLUMNS, expand_blocks, find_coded_groups
from nearflash.support.threads import CallingThread
from nearflash.weights.arrays import patterns

__all__ = ["expand_coded", "pack_coded"]

Bytes = NDArray[np.uint8]
Fields = NDArray[Any]
_BLOCK_ELEMENTS, _GROUP_BLOCKS = 1 << 16, 4
_LEVEL_CODES = {2: (3, 1, 3, 3), 1: (1, 1, 1, 3)}
"""Exponents that each level has codes of, by the bits of a first code."""
_READ_GROUPS = 4
"""Groups that are found, checked and then expanded at once, 2 MB of dense bytes."""
_THREADED_BYTES = 4 << 20
"""Dense bytes from which on threads are worth their start."""
_ESCAPE_BITS = 8
_WHERE = {
    StreamFault.LENGTH: "at byte {at}",
    StreamFault.COUNT: "ones behind the last element of block {place}",
    StreamFault.CHECKSUM: "another one in group {place}",
}


def pack_coded(values: NDArray[Any], *, block_elements: int = _BLOCK_ELEMENTS) -> bytes:
    """Coded weights of an array of float16, or of bf16 (the dtype of ml_dtypes, or its patterns in uint16).

    Nothing is rounded; elements whose bits are all zero have no value where there is a bitmap. Raises FormatError for
    another dtype, ShapeError for no element.
    """
    matrix, element = patterns(values.reshape(1, -1))
    if element is ElementFormat.INT8:
        raise FormatError(f"values must be of fp16 or bf16 to have coded exponents, not of {values.dtype}")
    words = matrix.ravel()
    code_bits, has_bitmap = _choose(words, element)
    header = CodedHeader(element, code_bits, has_bitmap, words.size, block_elements, _GROUP_BLOCKS, 0)
    size = block_elements * _GROUP_BLOCKS
    groups = [_pack_group(number, words[first : first + size], header)
              for number, first in enumerate(range(0, words.size, size))]  # fmt: skip
    ends = b"".join(group[-SECTION_BYTES:][:GROUP_END_BYTES] for group in groups)
    stream_bytes = HEADER_BYTES + sum(map(len, groups))
    return b"".join([replace(header, stream_bytes=stream_bytes, ends_crc32c=crc32c(ends)).pack(), *groups])


def _choose(words: Fields, element: ElementFormat) -> tuple[int, bool]:
    """Bits of a first code, and whether to have a bitmap, as the counts of the whole tensor are smallest with."""
    counts = np.bincount(_exponents(words, element), minlength=256)
    zeros = words.size - np.count_nonzero(words)
    rest = 16 - element.number_format.exponent_bits
    sizes = {}
    for has_bitmap in (False, True):
        present = counts.copy()
        present[0] -= zeros if has_bitmap else 0
        total = present.sum() * rest + (words.size if has_bitmap else 0)
        for code_bits in (1, 2):
            sizes[code_bits, has_bitmap] = total + _count_bits(np.sort(present)[::-1], code_bits)
    return min(sizes, key=lambda choice: sizes[choice])


def _count_bits(counts: Fields, code_bits: int) -> int:
    """Bits of all codes of exponents that came so many times, the most frequent first."""
    bits, first = 0, 0
    for codes in _LEVEL_CODES[code_bits]:
        bits += int(counts[first:].sum()) * (codes + 1).bit_length() - int(counts[first:].sum())
        first += codes
    return bits + _ESCAPE_BITS * int(counts[first:].sum())


def _pack_group(number: int, words: Fields, header: CodedHeader) -> bytes:
    """A group: its codebook, its blocks, and their checksum."""
    values = words[words != 0] if header.has_bitmap else words
    counts = np.bincount(_exponents(values, header.element), minlength=256)
    order = np.argsort(-counts, kind="stable")[: header.codebook_entries]
    book = np.where(counts[order] > 0, order, 0).astype(np.uint8)  # 0 where there are fewer
    ranks = np.full(256, header.codebook_entries, np.uint8)
    ranks[book[::-1]] = np.arange(book.size, dtype=np.uint8)[::-1]  # of equal entries the first counts
    body = book.tobytes().ljust(SECTION_BYTES, b"\0")
    for first in range(0, words.size, header.block_elements):
        body += _pack_block(words[first : first + header.block_elements], ranks, header)
    return body + pack_group_end(number, crc32c(body), len(body))


def _pack_block(words: Fields, ranks: Fields, header: CodedHeader) -> bytes:
    present = words != 0
    values = words[present] if header.has_bitmap else words
    exponents = _exponents(values, header.element)
    fields = {CodedSection.BITMAP: present}
    ranked, escaped = ranks[exponents], exponents
    for level, codes in zip(LEVELS, _LEVEL_CODES[header.code_bits], strict=True):
        fields[level] = np.minimum(ranked, codes)
        escaped = escaped[ranked >= codes]
        ranked = ranked[ranked >= codes] - np.uint8(codes)
    fields[CodedSection.ESCAPES] = escaped
    significand, dropped = values, 0
    if header.element is ElementFormat.FP16:
        fields[CodedSection.LOW], fields[CodedSection.MIDDLE], dropped = values & 1, values >> 1 & 3, 3
    fields[CodedSection.VALUES] = values >> 15 << 7 | significand >> dropped & 127
    return b"".join(_join(fields[section], bits) for section, bits in header.sections.items())


def _exponents(words: Fields, element: ElementFormat) -> Fields:
    number = element.number_format
    return (words >> number.mantissa_bits & ((1 << number.exponent_bits) - 1)).astype(np.uint8)


def _join(fields: Fields, bits: int) -> bytes:
    """A section of fields of 1, 2 or 8 bits, from the lowest bit up, padded."""
    values = fields.astype(np.uint8, copy=False)
    if bits == 2:
        quads = np.pad(values, (0, -values.size % 4)).reshape(-1, 4)
        data = (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6).tobytes()
    else:
        data = np.packbits(values, bitorder="little").tobytes() if bits == 1 else values.tobytes()
    return data.ljust(section_bytes(8 * len(data)), b"\0")


def expand_coded(stream: Bytes, out: NDArray[Any], executor: Executor | None = None) -> None:
    """Write the elements of coded weights to `out`, uint16 patterns, of as many elements.

    executor: by default the caller's thread for few elements, `expand_pool` for others. Raises StreamError; elements
    before the fault may have been written.
    """
    header = CodedHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    check_groups(stream.data, header)
    assert out.flags.c_contiguous and out.size == header.elements and out.dtype.itemsize == 2
    elements = out.reshape(-1)

    def expand(first_block: int, table: NDArray[np.int64]) -> None:
        expand_blocks(stream, header, table, elements[first_block * header.block_elements :])

    if executor is None:
        executor = CallingThread() if out.nbytes < _THREADED_BYTES else expand_pool()
    jobs = []
    try:
        for first_block, table in _find_blocks(stream, header):
            jobs.append(executor.submit(expand, first_block, table))
    finally:
        for job in jobs:
            job.result()  # the memory is theirs until then


def _find_blocks(stream: Bytes, header: CodedHeader) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Tables of the blocks of some groups at a time, each when its lengths and checksums are right."""
    at = HEADER_BYTES
    for group in range(0, header.groups, _READ_GROUPS):
        last = min(group + _READ_GROUPS, header.groups)
        first_block = group * header.group_blocks
        table = np.empty((min(last * header.group_blocks, header.blocks) - first_block, TABLE_COLUMNS), np.int64)
        fault, place, found, at = find_coded_groups(stream, header, at, (group, last), table)
        yield first_block, table[:found]
        if fault:
            raise bitmap_error(fault, _WHERE[fault].format(place=place, at=at), header.what)
    if at != stream.size:
        raise bitmap_error(StreamFault.LENGTH, f"{at} bytes of {stream.size}", header.what)
