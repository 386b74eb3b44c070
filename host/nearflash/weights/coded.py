"""Weights packed with coded exponents, losslessly, pruned or not.

Format: nearflash.abi.coded. The codes of a group are chosen for it; whether there is a bitmap, and bits of the first
code, by what makes the tensor smallest.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from nearflash.abi.bitmap import GROUP_END_BYTES, HEADER_BYTES, SECTION_BYTES, ElementFormat, pack_group_end
from nearflash.abi.coded import CodedHeader, level_bits
from nearflash.abi.errors import FormatError
from nearflash.device.backends.host.vector.coded_pack import BlockPacker, count_exponents
from nearflash.weights.arrays import patterns

__all__ = ["pack_coded"]

Fields = NDArray[Any]
_BLOCK_ELEMENTS, _GROUP_BLOCKS = 1 << 16, 4
_ESCAPE_BITS = 8


def pack_coded(values: NDArray[Any], *, block_elements: int = _BLOCK_ELEMENTS) -> bytes:
    """Coded weights of an array of float16, or of bf16 (the dtype of ml_dtypes, or its patterns in uint16).

    Nothing is rounded; elements whose bits are all zero have no value where there is a bitmap. Raises FormatError for
    another dtype, ShapeError for no element.
    """
    matrix, element = patterns(values.reshape(1, -1))
    if element is ElementFormat.INT8:
        raise FormatError(f"values must be of fp16 or bf16 to have coded exponents, not of {values.dtype}")
    words, size = matrix.ravel(), block_elements * _GROUP_BLOCKS
    parts = [words[first : first + size] for first in range(0, words.size, size)]
    counted = [count_exponents(part, element) for part in parts]
    totals = np.sum([counts for counts, _ in counted], axis=0)
    code_bits, has_bitmap = _choose(totals, sum(zeros for _, zeros in counted), element)
    header = CodedHeader(element, code_bits, has_bitmap, words.size, block_elements, _GROUP_BLOCKS, 0)
    packer = BlockPacker(header)
    groups = [_pack_group(number, part, _present(*counted[number], has_bitmap), header, packer)
              for number, part in enumerate(parts)]  # fmt: skip
    ends = b"".join(group[-SECTION_BYTES:][:GROUP_END_BYTES] for group in groups)
    stream_bytes = HEADER_BYTES + sum(map(len, groups))
    return b"".join([replace(header, stream_bytes=stream_bytes, ends_crc32c=crc32c(ends)).pack(), *groups])


def _present(counts: Fields, zeros: int, has_bitmap: bool) -> Fields:
    """Counts of the exponents of values: all elements, but for zeros where there is a bitmap."""
    present = counts.copy()
    present[0] -= zeros if has_bitmap else 0
    return present


def _choose(counts: Fields, zeros: int, element: ElementFormat) -> tuple[int, bool]:
    """Bits of a first code, and whether to have a bitmap, as the counts of the whole tensor are smallest with."""
    elements = int(counts.sum())
    rest = 16 - element.number_format.exponent_bits
    sizes = {}
    for has_bitmap in (False, True):
        present = _present(counts, zeros, has_bitmap)
        total = present.sum() * rest + (elements if has_bitmap else 0)
        for code_bits in (1, 2):
            sizes[code_bits, has_bitmap] = total + _count_bits(np.sort(present)[::-1], code_bits)
    return min(sizes, key=lambda choice: sizes[choice])


def _count_bits(counts: Fields, code_bits: int) -> int:
    """Bits of all codes of exponents that came so many times, the most frequent first."""
    total, first = 0, 0
    for bits in level_bits(code_bits):
        total += bits * int(counts[first:].sum())
        first += (1 << bits) - 1
    return total + _ESCAPE_BITS * int(counts[first:].sum())


def _pack_group(number: int, words: Fields, counts: Fields, header: CodedHeader, packer: BlockPacker) -> bytes:
    """A group: its codebook, its blocks, and their checksum."""
    order = np.argsort(-counts, kind="stable")[: header.codebook_entries]
    book = np.where(counts[order] > 0, order, 0).astype(np.uint8)  # 0 where there are fewer
    ranks = np.full(256, header.codebook_entries, np.uint8)
    ranks[book[::-1]] = np.arange(book.size, dtype=np.uint8)[::-1]  # of equal entries the first counts
    blocks = [words[first : first + header.block_elements] for first in range(0, words.size, header.block_elements)]
    body = np.empty(SECTION_BYTES + sum(packer.block_bytes(block.size) for block in blocks), np.uint8)
    body[:SECTION_BYTES] = 0
    body[: book.size] = book
    at = SECTION_BYTES
    for block in blocks:
        at += packer.pack(block, ranks, body[at:])
    data = body[:at].tobytes()
    return data + pack_group_end(number, crc32c(data), len(data))
