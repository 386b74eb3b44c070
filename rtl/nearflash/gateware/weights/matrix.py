"""Interfaces between the units of a matrix's data path: commands, parts of a matrix, rows.

Source: nearflash.abi.bitmap.
"""

from enum import IntEnum
from typing import Any

from amaranth.lib import data

from nearflash.abi.bitmap import CODEBOOK_ENTRIES, SECTIONS, RowFormat, Section
from nearflash.abi.coded import CODEBOOK_ENTRIES_MAX, CodedSection, LevelFormat

__all__ = [
    "BLOCK_PARTS",
    "CODED",
    "SCALED",
    "BlockPart",
    "MatrixCommand",
    "MatrixFormat",
    "Part",
    "block_layout",
    "is_levels",
    "queue_words",
    "row_layout",
]


CODED = tuple(form for form, sections in SECTIONS.items() if Section.CODES in sections)
"""Formats with planes of coded values."""
SCALED = tuple(form for form, sections in SECTIONS.items() if Section.SCALES in sections)
"""Formats of codes with scales."""


def queue_words(fields: int, bits: int, port_bits: int) -> int:
    """Depth of a queue in block RAM for two rows of so many fields: the next row comes while one is expanded."""
    return 2 * -(-fields * bits // port_bits) + 1


class MatrixFormat(data.Struct):
    """Formats as a header has them (ElementFormat, Coding); `output` is 0 where elements are what they are."""

    element: 8
    coding: 8
    output: 8


class MatrixCommand(data.Struct):
    """A matrix of `rows` x `columns` elements in `in_bytes` bytes; `stated` is in its header, `row_format` follows.

    Of coded weights, whose row_format is a LevelFormat, `rows` are the elements and `columns` those of a block.
    """

    in_bytes: 32
    rows: 32
    columns: 32
    stated: MatrixFormat
    row_format: RowFormat


class Part(IntEnum):
    """A part of a matrix that begins with a block of 64 bytes: sections of rows, and single blocks."""

    BITMAP = Section.BITMAP
    SCALES = Section.SCALES
    LOW = Section.LOW
    CODES = Section.CODES
    ESCAPES = Section.ESCAPES
    VALUES = Section.VALUES
    HEADER = 8
    CODEBOOK = 9
    END = 10


class BlockPart(IntEnum):
    """A section of a block of coded weights that no row has, numbered behind Part."""

    FIRST = 11
    SECOND = 12
    THIRD = 13
    FOURTH = 14
    MIDDLE = 15


BLOCK_PARTS = {section: (BlockPart if section.name in BlockPart.__members__ else Part)[section.name]
               for section in CodedSection}  # fmt: skip
"""Part of each section of a block of coded weights, in order."""


def row_layout(columns_max: int) -> data.StructLayout:
    """A row whose sections are whole: its values, and where they are coded its escapes and its group's codebook."""
    count_bits = columns_max.bit_length()
    return data.StructLayout({"values": count_bits, "escapes": count_bits, "codebook": 8 * CODEBOOK_ENTRIES})


def block_layout(elements_max: int) -> data.StructLayout:
    """A row, or a block of coded weights, whose sections are whole: also its elements and the codes of each level."""
    counts = ("columns", "seconds", "thirds", "fourths")
    return data.StructLayout(
        {
            **row_layout(elements_max).members,
            "codebook": 8 * CODEBOOK_ENTRIES_MAX,
            **dict.fromkeys(counts, elements_max.bit_length()),
        }
    )


def is_levels(row_format: Any) -> Any:
    """Whether a command's format is one of coded weights."""
    return row_format >= min(LevelFormat)
