"""Coded weights expanded on a GPU, in Triton; under its interpreter (TRITON_INTERPRET=1) on the CPU, too.

A program takes a segment of a block. It first counts what the sections have for the elements before: in each level the
codes that lead on, whose count is the place in the next one. Then it goes on tile after tile: in each level a prefix
sum over the elements that have a code there gives the places of these codes, and the sum of all is carried on.
Programs do not wait for each other; of what another one reads, one reads again at most the block's codes.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.coded import CodedHeader
from nearflash.weights.gpu_kernels import make_target, section_bytes

__all__ = ["expand_blocks"]

_SEGMENT: Final = 8192
"""Elements of a program, at most: fewer are more programs, and more that is counted again."""
_TILE: Final = 2048
_WORDS = tl.constexpr(1024)
"""Of 32 bits, counted at once."""
_COLUMNS = tl.constexpr(8)
"""Of the table."""


def expand_blocks(stream: Tensor, table: Tensor, header: CodedHeader, out: Tensor | None = None) -> Tensor:
    """The dense elements (elements,) of a stream, which must have been checked: lengths and checksums are believed.

    stream: uint8 (bytes,), at an address that is a multiple of 4. table: int64 (blocks, 8), of each block where it and
    its group begin, its elements, its values, and those of the second to the fourth level and of the escapes. out: of
    that shape and of float16 or bfloat16, contiguous, written where given. All on one device. Raises ShapeError,
    FormatError for another `out`.
    """
    is_fp16 = header.element is ElementFormat.FP16
    out = make_target((header.elements,), torch.float16 if is_fp16 else torch.bfloat16, out, stream.device)
    longest = min(header.block_elements, header.elements)
    segment, tile = (min(most, triton.next_power_of_2(longest)) for most in (_SEGMENT, _TILE))
    segments = triton.cdiv(longest, segment)
    _expand[(header.blocks * segments,)](
        stream, stream.view(torch.int32), out.view(torch.int16), table, header.block_elements, segments,
        FP16=is_fp16, BITS=header.code_bits, BITMAP=header.has_bitmap, SEGMENT=segment, TILE=tile, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _count(words_at, count, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of so many fields of 1 or 2 bits are all ones. words_at: int32, of a section."""
    bits, ones = count * BITS, tl.zeros([_WORDS], tl.int32)
    for first in range(0, (bits + 31) // 32, _WORDS):
        place = tl.arange(0, _WORDS)
        left = tl.minimum(bits - 32 * first, 32 * _WORDS).to(tl.int32) - 32 * place
        word = tl.load(words_at + first + place, mask=left > 0, other=0)
        word = tl.where(left < 32, word & ((1 << left) - 1), word)
        if BITS == 2:
            word = word & word >> 1 & 0x55555555
        else:
            word = (word & 0x55555555) + (word >> 1 & 0x55555555)
        word = (word & 0x33333333) + (word >> 2 & 0x33333333)
        word = word + (word >> 4) & 0x0F0F0F0F
        word += word >> 8
        ones += word + (word >> 16) & 63
    return tl.sum(ones, 0).to(tl.int64)


@triton.jit
def _fields(bytes_at, before, rank, taken, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fields `rank` behind the first `before` ones of a section; 0 where none is taken."""
    bit = (before * BITS & 7).to(tl.int32) + rank * BITS
    field = tl.load(bytes_at + (before * BITS >> 3) + (bit >> 3), mask=taken, other=0).to(tl.int32)
    return field >> (bit & 7) & ((1 << BITS) - 1)


@triton.jit
def _codes(bytes_at, before, deeper, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of a level of the elements that have one, 0 of others; which lead on; and what is before the next tile."""
    taken = deeper.to(tl.int32)
    code = _fields(bytes_at, before, tl.cumsum(taken, 0) - taken, deeper, BITS)
    return code, deeper & (code == (1 << BITS) - 1), before + tl.sum(taken, 0)


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    bytes_at, words_at, out, table, block_elements, segments,
    FP16: tl.constexpr, BITS: tl.constexpr, BITMAP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // segments
    line, target = table + block * _COLUMNS, out + block.to(tl.int64) * block_elements
    begin, book = tl.load(line), bytes_at + tl.load(line + 1)
    elements, values = tl.load(line + 2), tl.load(line + 3)
    first_at = begin + section_bytes(elements) if BITMAP else begin
    second_at = first_at + section_bytes(values * BITS)
    third_at = second_at + section_bytes(tl.load(line + 4))
    fourth_at = third_at + section_bytes(tl.load(line + 5) * BITS)
    escapes_at = fourth_at + section_bytes(tl.load(line + 6) * 2)
    low_at = escapes_at + section_bytes(tl.load(line + 7) * 8)
    middle_at = low_at + section_bytes(values) if FP16 else low_at
    high_at = middle_at + section_bytes(values * 2) if FP16 else low_at

    # What lies before the segment. Of a last block, segments behind its end count and write nothing more.
    start = tl.minimum((tl.program_id(0) % segments).to(tl.int64) * SEGMENT, elements)
    value = _count(words_at + begin // 4, start, 1) if BITMAP else start
    second = _count(words_at + first_at // 4, value, BITS)
    third = _count(words_at + second_at // 4, second, 1)
    fourth = _count(words_at + third_at // 4, third, BITS)
    escape = _count(words_at + fourth_at // 4, fourth, 2)

    for step in range(0, SEGMENT, TILE):
        first, column = start + step, tl.arange(0, TILE)
        inside = column < elements - first
        if BITMAP:
            bit = _fields(bytes_at + begin, first, column, inside, 1)
            present, rank = bit == 1, tl.cumsum(bit, 0) - bit
        else:
            present, rank = inside, column
        code = _fields(bytes_at + first_at, value, rank, present, BITS)
        entry, deeper = code, present & (code == (1 << BITS) - 1)
        code, deeper, second = _codes(bytes_at + second_at, second, deeper, 1)
        entry += code
        code, deeper, third = _codes(bytes_at + third_at, third, deeper, BITS)
        entry += code
        code, deeper, fourth = _codes(bytes_at + fourth_at, fourth, deeper, 2)
        escaped, _, escape = _codes(bytes_at + escapes_at, escape, deeper, 8)
        exponent = tl.load(book + entry + code, mask=present, other=0).to(tl.int32)
        exponent = tl.where(deeper, escaped, exponent)
        high = tl.load(bytes_at + high_at + value + rank, mask=present, other=0).to(tl.int32)
        if FP16:
            low = _fields(bytes_at + low_at, value, rank, present, 1)
            middle = _fields(bytes_at + middle_at, value, rank, present, 2)
            word = high >> 7 << 15 | (exponent & 31) << 10 | (high & 127) << 3 | middle << 1 | low
        else:
            word = high >> 7 << 15 | exponent << 7 | high & 127
        tl.store(target + first + column, tl.where(present, word, 0).to(tl.int16), mask=inside)
        value += tl.sum(present.to(tl.int32), 0)
