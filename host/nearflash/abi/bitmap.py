"""Bitmap matrices: what a pruned weight matrix looks like on flash (docs/contracts/weights.md, section 1).

    header, 64 bytes │ group: codebook │ row: bitmap │ … │ row: values │ … │ end of the group │ group: …

All is little endian; every section begins at a multiple of 64 bytes and is padded with zeros.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, Protocol

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import FormatError, ShapeError, StreamError
from nearflash.abi.formats import BF16, FP16, INT4, INT8, NumberFormat
from nearflash.abi.python310 import Self
from nearflash.abi.topk import StreamFault

__all__ = [
    "CODEBOOK_ENTRIES",
    "ESCAPE",
    "GROUP_END",
    "GROUP_END_BYTES",
    "HEADER_BYTES",
    "MAGIC",
    "SCALE_COLUMNS",
    "SECTIONS",
    "SECTION_BYTES",
    "VERSION",
    "BitmapHeader",
    "Coding",
    "ElementFormat",
    "GroupedHeader",
    "RowFormat",
    "Section",
    "bitmap_error",
    "check_groups",
    "pack_fields",
    "pack_group_end",
    "row_format",
    "section_bytes",
    "section_fields",
    "unpack_fields",
]

MAGIC = b"NFBM"
VERSION = 1
SECTION_BYTES = 64
"""Sections begin at multiples of this: one beat of a 512-bit port."""
HEADER_BYTES = SECTION_BYTES
GROUP_END = struct.Struct("<II56x")
"""End of a group of rows: its number, CRC32C of its bytes. What a kernel reads of it."""
GROUP_END_BYTES = 16
"""Of it that are used: behind number and CRC32C, the bytes of the group before it, by which a host finds the others."""
SCALE_COLUMNS = 64
"""Columns of a row that share a scale and a minimum."""
CODEBOOK_ENTRIES = 3
"""Exponents, a byte each, in a group's codebook."""
ESCAPE = CODEBOOK_ENTRIES
"""Code of an exponent that the codebook does not have."""
_HEADER = struct.Struct("<4sHBBIIIHBxQII20x")
_BOUND = 1
"""In the header: its next field is the CRC32C of the groups' ends."""
_END = struct.Struct("<IIQ48x")


class ElementFormat(IntEnum):
    """Number format of elements."""

    FP16 = 1
    BF16 = 2
    INT8 = 3
    INT4 = 4
    """Unsigned, with scales."""

    @property
    def number_format(self) -> NumberFormat:
        """The format itself."""
        return (FP16, BF16, INT8, INT4)[self - 1]


class Coding(IntEnum):
    """Coding of a row's values."""

    PLAIN = 0
    """The elements themselves."""
    EXPONENTS = 1
    """Planes of bits, with the exponents as codes of a codebook."""
    LEVELS = 2
    """Of no matrix: coded weights (nearflash.abi.coded)."""


class RowFormat(IntEnum):
    """Which sections a row has: element format, coding and whether there are scales, as far as they differ in that."""

    PLAIN16 = 0
    PLAIN8 = 1
    CODED_FP16 = 2
    CODED_BF16 = 3
    SCALED8 = 4
    SCALED4 = 5


class Section(IntEnum):
    """A section of a row, numbered in the order in which they lie there."""

    BITMAP = 0
    SCALES = 1
    LOW = 2
    CODES = 3
    ESCAPES = 4
    VALUES = 5


SECTIONS: dict[RowFormat, dict[Section, int]] = {
    RowFormat.PLAIN16: {Section.BITMAP: 1, Section.VALUES: 16},
    RowFormat.PLAIN8: {Section.BITMAP: 1, Section.VALUES: 8},
    RowFormat.CODED_FP16: {
        Section.BITMAP: 1, Section.LOW: 1, Section.CODES: 4, Section.ESCAPES: 8, Section.VALUES: 8,
    },
    RowFormat.CODED_BF16: {Section.BITMAP: 1, Section.CODES: 2, Section.ESCAPES: 8, Section.VALUES: 8},
    RowFormat.SCALED8: {Section.BITMAP: 1, Section.SCALES: 32, Section.VALUES: 8},
    RowFormat.SCALED4: {Section.BITMAP: 1, Section.SCALES: 32, Section.VALUES: 4},
}  # fmt: skip
"""Sections that a row of each format has, in order: bits of one of their fields."""
_ROW_FORMATS = {
    (ElementFormat.FP16, Coding.PLAIN, False): RowFormat.PLAIN16,
    (ElementFormat.BF16, Coding.PLAIN, False): RowFormat.PLAIN16,
    (ElementFormat.INT8, Coding.PLAIN, False): RowFormat.PLAIN8,
    (ElementFormat.FP16, Coding.EXPONENTS, False): RowFormat.CODED_FP16,
    (ElementFormat.BF16, Coding.EXPONENTS, False): RowFormat.CODED_BF16,
    (ElementFormat.INT8, Coding.PLAIN, True): RowFormat.SCALED8,
    (ElementFormat.INT4, Coding.PLAIN, True): RowFormat.SCALED4,
}
_OUTPUTS = (ElementFormat.FP16, ElementFormat.BF16)


def row_format(element: ElementFormat, coding: Coding, output: ElementFormat | None) -> RowFormat:
    """Format of the rows. Raises FormatError for formats that do not go together."""
    row_format = _ROW_FORMATS.get((element, coding, output is not None))
    if row_format is None or output not in (None, *_OUTPUTS):
        rule = "fp16 or bf16, plain or coded, or int8, without an output format, or int8 or int4 with fp16 or bf16"
        names = f"{element.name}, coding {coding.name}, output {output.name if output else None}"
        raise FormatError(f"a bitmap matrix must be of {rule}, not of {names}")
    return row_format


def section_fields(section: Section, columns: int, values: int, escapes: int) -> int:
    """Fields in a section of a row of `columns` columns, with so many values, of which `escapes` have code 3."""
    others = {Section.BITMAP: columns, Section.SCALES: -(-columns // SCALE_COLUMNS), Section.ESCAPES: escapes}
    return others.get(section, values)


def section_bytes(bits: int) -> int:
    """Bytes of a section of so many bits."""
    return -(-bits // (8 * SECTION_BYTES)) * SECTION_BYTES


def pack_group_end(number: int, checksum: int, body_bytes: int) -> bytes:
    """End of group `number`, of `body_bytes` bytes before it with that CRC32C."""
    return _END.pack(number, checksum, body_bytes)


class GroupedHeader(Protocol):
    """The header of a stream in groups that state their bytes and checksums."""

    what: ClassVar[str]

    @property
    def stream_bytes(self) -> int:
        """Bytes of the stream."""

    @property
    def groups(self) -> int:
        """Groups of it."""

    @property
    def ends_crc32c(self) -> int | None:
        """CRC32C of the first GROUP_END_BYTES of all groups' ends, in order; None where it is not stated."""


def check_groups(stream: memoryview, header: GroupedHeader) -> None:
    """Compare the ends of a stream's groups with its header, so that none is another stream's or another place's.

    A kernel compares each group's bytes with its end. Takes 64 bytes of each group, the last one first. Raises
    StreamError.
    """
    fail = partial(bitmap_error, what=header.what)
    if header.ends_crc32c is None:
        raise fail(StreamFault.HEADER, "one that does not state its groups, as an older nearflash wrote it")
    ends, at = [], header.stream_bytes
    for number in reversed(range(header.groups)):
        at -= SECTION_BYTES
        if at < HEADER_BYTES:
            raise fail(StreamFault.LENGTH, f"fewer than its {header.groups} groups")
        magic, _, body_bytes = _END.unpack_from(stream, at)
        if magic != number:
            raise fail(StreamFault.CHECKSUM, f"group {magic} in the place of group {number}")
        ends.append(bytes(stream[at : at + GROUP_END_BYTES]))
        at -= body_bytes
    if at != HEADER_BYTES or crc32c(b"".join(reversed(ends))) != header.ends_crc32c:
        raise fail(StreamFault.CHECKSUM, "ends of groups that its header does not state")


def bitmap_error(fault: StreamFault, detail: str, what: str = "a bitmap matrix") -> StreamError:
    """The error for a matrix, or other weights, with HEADER, LENGTH, CHECKSUM or COUNT wrong."""
    rule = {
        StreamFault.HEADER: f"must begin with the header of {what} of the shape and format expected",
        StreamFault.LENGTH: "must end where its header states",
        StreamFault.CHECKSUM: "must have the CRC32C that is written in it",
        StreamFault.COUNT: "must have no values beyond its columns",
    }[fault]
    return StreamError(f"{what} {rule}, not {detail}; compress the weights again", fault)


def pack_fields(layout: struct.Struct, *fields: Any) -> bytes:
    """A header's 64 bytes; the last four are the CRC32C of those before."""
    text = layout.pack(*fields)
    return text + crc32c(text).to_bytes(4, "little")


def unpack_fields(
    text: bytes, stream_bytes: int, layout: struct.Struct, kind: tuple[bytes, int], what: str
) -> tuple[Any, ...]:
    """The fields of a header behind `kind`, its magic and version. Raises StreamError for another or a damaged one."""
    if min(len(text), stream_bytes) < HEADER_BYTES:
        raise bitmap_error(StreamFault.LENGTH, f"after {min(len(text), stream_bytes)} bytes", what)
    magic, version, *fields = layout.unpack(text[: layout.size])
    if (magic, version) != kind:
        raise bitmap_error(StreamFault.HEADER, f"magic {magic!r} and version {version}", what)
    if crc32c(text[: layout.size]) != int.from_bytes(text[layout.size : HEADER_BYTES], "little"):
        raise bitmap_error(StreamFault.CHECKSUM, "another one in its header", what)
    return tuple(fields)


@dataclass(frozen=True)
class BitmapHeader:
    """Header of a matrix of `rows` rows and `columns` columns, checked in groups of `group_rows` rows."""

    what: ClassVar[str] = "a bitmap matrix"

    element: ElementFormat
    rows: int
    columns: int
    group_rows: int
    stream_bytes: int
    """Bytes with the header."""
    coding: Coding = Coding.PLAIN
    output: ElementFormat | None = None
    """What elements with a scale and a minimum expand to, fp16 or bf16; None: elements are what they are."""
    ends_crc32c: int | None = None
    """CRC32C of the first GROUP_END_BYTES of all groups' ends, in order; None in streams of an older nearflash."""

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "group_rows"):
            if not 0 < getattr(self, name) < 1 << 32:
                raise ShapeError(f"{name} must be between 1 and 2^32 - 1, not {getattr(self, name)!r}")
        row_format(self.element, self.coding, self.output)

    @property
    def groups(self) -> int:
        """Groups of rows; the last one may have fewer."""
        return -(-self.rows // self.group_rows)

    @property
    def row_format(self) -> RowFormat:
        """Which sections the rows have."""
        return row_format(self.element, self.coding, self.output)

    @property
    def dense(self) -> ElementFormat:
        """Format of the dense elements."""
        return self.output or self.element

    def pack(self) -> bytes:
        """The header's 64 bytes; the last four are the CRC32C of those before."""
        scaling = (SCALE_COLUMNS, self.output) if self.output else (0, 0)
        fields = (self.element, self.coding, self.rows, self.columns, self.group_rows, *scaling, self.stream_bytes)
        bound = (0, 0) if self.ends_crc32c is None else (_BOUND, self.ends_crc32c)
        return pack_fields(_HEADER, MAGIC, VERSION, *fields, *bound)

    @classmethod
    def unpack(cls, text: bytes, stream_bytes: int) -> Self:
        """Header of a stream of `stream_bytes` bytes. Raises StreamError for any other."""
        fields = unpack_fields(text, stream_bytes, _HEADER, (MAGIC, VERSION), cls.what)
        element, coding, rows, columns, group_rows, scale_columns, output, stated, bound, ends = fields
        known = (element, coding, output != 0) in _ROW_FORMATS and output in (0, *_OUTPUTS)
        if not known or scale_columns != (SCALE_COLUMNS if output else 0) or not (rows and columns and group_rows):
            header_text = f"format {element}, coding {coding}, output {output}, {scale_columns} columns a scale"
            header_text += f", {rows} x {columns} elements, {group_rows} rows a group"
            raise bitmap_error(StreamFault.HEADER, header_text)
        if stated != stream_bytes:
            raise bitmap_error(StreamFault.LENGTH, f"{stream_bytes} bytes where {stated} are stated")
        scaled = ElementFormat(output) if output else None
        found_ends = ends if bound == _BOUND else None
        return cls(ElementFormat(element), rows, columns, group_rows, stream_bytes, Coding(coding), scaled, found_ends)
