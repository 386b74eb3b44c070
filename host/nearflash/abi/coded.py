"""Coded weights: fp16 or bf16 values whose exponents are codes in levels, with a bitmap where many are zero.

    header, 64 bytes │ group: codebook │ block: sections │ block: … │ end of the group │ group: …

A block is of up to `block_elements` elements of the flattened tensor. The first level has a code of 1 or 2 bits of each
value; the last code of a level says that the next one has the value's: the second level has a bit, the third as many as
the first, the fourth two, and behind it comes the exponent itself. So frequent exponents take little, and no field's
place depends on a value's but by a count. All is little endian; every section begins at a multiple of 64 bytes and is
padded with zeros. Layout: docs/contracts/weights.md, section 5.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from nearflash.abi.bitmap import ElementFormat, pack_fields, unpack_fields
from nearflash.abi.blocks import BlockSizes, check_stated_sizes
from nearflash.abi.errors import FormatError
from nearflash.abi.python310 import Self

__all__ = [
    "CODEBOOK_ENTRIES_MAX",
    "CODED_MAGIC",
    "CODED_VERSION",
    "LEVELS",
    "CodedHeader",
    "CodedSection",
    "LevelFormat",
    "count_entries",
    "level_bits",
    "level_format",
    "list_sections",
]

CODED_MAGIC = b"NFCW"
CODED_VERSION = 1
_HEADER = struct.Struct("<4sHBBB3xIIQQI20x")


class CodedSection(IntEnum):
    """A section of a block, numbered in the order in which they lie there."""

    BITMAP = 0
    FIRST = 1
    SECOND = 2
    THIRD = 3
    FOURTH = 4
    ESCAPES = 5
    LOW = 6
    MIDDLE = 7
    VALUES = 8


class LevelFormat(IntEnum):
    """Coded weights among the formats of the `expand` kernel, numbered behind nearflash.abi.bitmap.RowFormat."""

    LEVELS_FP16 = 6
    LEVELS_BF16 = 7

    @property
    def element(self) -> ElementFormat:
        """Format of the elements."""
        return ElementFormat.FP16 if self is LevelFormat.LEVELS_FP16 else ElementFormat.BF16


LEVELS = (CodedSection.FIRST, CodedSection.SECOND, CodedSection.THIRD, CodedSection.FOURTH)


def level_format(element: ElementFormat) -> LevelFormat:
    """Format of coded weights of fp16 or bf16. Raises FormatError for others."""
    if element not in (ElementFormat.FP16, ElementFormat.BF16):
        raise FormatError(f"coded weights must be of fp16 or bf16, not of {element.name}")
    return LevelFormat.LEVELS_FP16 if element is ElementFormat.FP16 else LevelFormat.LEVELS_BF16


def level_bits(code_bits: int) -> tuple[int, ...]:
    """Bits of a code of each level. The last one, all ones, leads on to the next level; the others are exponents'."""
    return code_bits, 1, code_bits, 2


def count_entries(code_bits: int) -> int:
    """Exponents that have codes: of each level as many as its codes without the last."""
    return sum((1 << bits) - 1 for bits in level_bits(code_bits))


CODEBOOK_ENTRIES_MAX = count_entries(2)
"""Exponents, a byte each, in the largest codebook."""


def list_sections(element: ElementFormat, code_bits: int, has_bitmap: bool) -> dict[CodedSection, int]:
    """Sections of a block in order: bits of one of their fields. LOW and MIDDLE are bits 0 and 1 to 2 of an fp16
    significand; VALUES has the sign and what is left of the significand.
    """
    bitmap = {CodedSection.BITMAP: 1} if has_bitmap else {}
    narrow = {CodedSection.LOW: 1, CodedSection.MIDDLE: 2} if element is ElementFormat.FP16 else {}
    levels = dict(zip(LEVELS, level_bits(code_bits), strict=True))
    return {**bitmap, **levels, CodedSection.ESCAPES: 8, **narrow, CodedSection.VALUES: 8}


@dataclass(frozen=True)
class CodedHeader(BlockSizes):
    """Header of the coded weights of a tensor of so many elements, in blocks, checked in groups of blocks."""

    what: ClassVar[str] = "coded weights"

    element: ElementFormat
    """FP16 or BF16."""
    code_bits: int
    """Bits of a code of the first and of the third level: 1 or 2."""
    has_bitmap: bool
    """Whether blocks say which elements are not zero, and have values of these alone."""
    elements: int
    block_elements: int
    group_blocks: int
    stream_bytes: int
    """Bytes with the header."""
    ends_crc32c: int | None = 0
    """CRC32C of the used bytes of all groups' ends, in order (nearflash.abi.bitmap.check_groups)."""

    def __post_init__(self) -> None:
        if self.element not in (ElementFormat.FP16, ElementFormat.BF16) or self.code_bits not in (1, 2):
            what = f"{self.element.name} and {self.code_bits} bits"
            raise FormatError(f"coded weights must be of fp16 or bf16, with first codes of 1 or 2 bits, not of {what}")
        self.check_sizes()

    @property
    def dense(self) -> ElementFormat:
        """Format of what it expands to, as nearflash.abi.bitmap.BitmapHeader has it."""
        return self.element

    @property
    def codebook_entries(self) -> int:
        """Exponents that have codes."""
        return count_entries(self.code_bits)

    @property
    def sections(self) -> dict[CodedSection, int]:
        """Sections of a block."""
        return list_sections(self.element, self.code_bits, self.has_bitmap)

    def pack(self) -> bytes:
        """The header's 64 bytes; the last four are the CRC32C of those before."""
        kind = self.element, self.code_bits, self.has_bitmap
        sizes = self.block_elements, self.group_blocks, self.elements, self.stream_bytes, self.ends_crc32c
        return pack_fields(_HEADER, CODED_MAGIC, CODED_VERSION, *kind, *sizes)

    @classmethod
    def unpack(cls, text: bytes, stream_bytes: int) -> Self:
        """Header of a stream of `stream_bytes` bytes. Raises StreamError for any other."""
        fields = unpack_fields(text, stream_bytes, _HEADER, (CODED_MAGIC, CODED_VERSION), cls.what)
        element, code_bits, has_bitmap, block_elements, group_blocks, elements, stated, ends = fields
        check_stated_sizes(
            elements, block_elements, group_blocks, stated, stream_bytes, cls.what,
            form=f"format {element}, codes of {code_bits} bits, bitmap {has_bitmap}, ",
            is_known=element in (1, 2) and code_bits in (1, 2) and has_bitmap < 2,
        )  # fmt: skip
        kind = ElementFormat(element), code_bits, bool(has_bitmap)
        return cls(*kind, elements, block_elements, group_blocks, stream_bytes, ends)
