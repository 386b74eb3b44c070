"""Bitmap matrices: what a pruned weight matrix looks like on flash (docs/weights.md, section 1).

    header, 64 bytes │ row: bitmap │ row: values │ … │ end of a group │ row: bitmap │ …

All is little endian; every section begins at a multiple of 64 bytes and is padded with zeros.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import ShapeError, StreamError
from nearflash.abi.formats import BF16, FP16, INT8, NumberFormat
from nearflash.abi.topk import StreamFault

__all__ = [
    "GROUP_END",
    "HEADER_BYTES",
    "MAGIC",
    "SECTION_BYTES",
    "VERSION",
    "BitmapHeader",
    "ElementFormat",
    "bitmap_error",
    "section_bytes",
]

MAGIC = b"NFBM"
VERSION = 1
SECTION_BYTES = 64
"""Sections begin at multiples of this: one beat of a 512-bit port."""
HEADER_BYTES = SECTION_BYTES
GROUP_END = struct.Struct("<II56x")
"""End of a group of rows: its number, CRC32C of its bytes."""
_HEADER = struct.Struct("<4sHBxIIIIQ28x")


class ElementFormat(IntEnum):
    """Number format of the elements. The expander moves bits, so fp16 and bf16 are the same to it."""

    FP16 = 1
    BF16 = 2
    INT8 = 3

    @property
    def number_format(self) -> NumberFormat:
        """The format itself."""
        return {ElementFormat.FP16: FP16, ElementFormat.BF16: BF16, ElementFormat.INT8: INT8}[self]


def section_bytes(bits: int) -> int:
    """Bytes of a section of so many bits."""
    return -(-bits // (8 * SECTION_BYTES)) * SECTION_BYTES


def bitmap_error(fault: StreamFault, detail: str) -> StreamError:
    """The error for a matrix with HEADER, LENGTH or CHECKSUM wrong."""
    rule = {
        StreamFault.HEADER: "must begin with the header of a bitmap matrix of the shape and format expected",
        StreamFault.LENGTH: "must end where its header says",
        StreamFault.CHECKSUM: "must have the CRC32C that is written in it",
    }[fault]
    return StreamError(f"a bitmap matrix {rule}, not {detail}; compress the weights again", fault)


@dataclass(frozen=True)
class BitmapHeader:
    """Header of a matrix of `rows` rows and `columns` columns, checked in groups of `group_rows` rows."""

    element: ElementFormat
    rows: int
    columns: int
    group_rows: int
    stream_bytes: int
    """Bytes with the header."""

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "group_rows"):
            if not 0 < getattr(self, name) < 1 << 32:
                raise ShapeError(f"{name} must be between 1 and 2^32 - 1, not {getattr(self, name)!r}")

    @property
    def groups(self) -> int:
        """Groups of rows; the last one may have fewer."""
        return -(-self.rows // self.group_rows)

    def pack(self) -> bytes:
        """The header's 64 bytes; the last four are the CRC32C of those before."""
        fields = (self.element, self.rows, self.columns, self.group_rows, 0, self.stream_bytes)
        text = _HEADER.pack(MAGIC, VERSION, *fields)
        return text + crc32c(text).to_bytes(4, "little")

    @classmethod
    def unpack(cls, text: bytes, stream_bytes: int) -> Self:
        """Header of a stream of `stream_bytes` bytes. Raises StreamError for any other."""
        if min(len(text), stream_bytes) < HEADER_BYTES:
            raise bitmap_error(StreamFault.LENGTH, f"after {min(len(text), stream_bytes)} bytes")
        magic, version, element, rows, columns, group_rows, _, said = _HEADER.unpack(text[: _HEADER.size])
        if magic != MAGIC or version != VERSION:
            raise bitmap_error(StreamFault.HEADER, f"magic {magic!r} and version {version}")
        if crc32c(text[: _HEADER.size]) != int.from_bytes(text[_HEADER.size : HEADER_BYTES], "little"):
            raise bitmap_error(StreamFault.CHECKSUM, "another one in its header")
        if element not in list(ElementFormat) or not (rows and columns and group_rows):
            found = f"format {element}, {rows} x {columns} elements, {group_rows} rows a group"
            raise bitmap_error(StreamFault.HEADER, found)
        if said != stream_bytes:
            raise bitmap_error(StreamFault.LENGTH, f"{stream_bytes} bytes where {said} are said")
        return cls(ElementFormat(element), rows, columns, group_rows, stream_bytes)
