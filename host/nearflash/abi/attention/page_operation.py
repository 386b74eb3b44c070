"""Page operations: what the attend kernel reads to program, erase or read pages of its NAND, and its completions.

A batch is an array of records of 32 bytes; completion i, 8 bytes, belongs to record i. Little endian, as packed here.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import ClassVar

from nearflash.abi.attention.codeword import CODEWORD_BYTES, SEALED_BYTES, PageKind, PageTag
from nearflash.abi.errors import CommandError

__all__ = [
    "OPERATION_BYTES",
    "OPERATION_COMPLETION_BYTES",
    "OPERATION_FIELDS",
    "PAGE_FAULT_ADVICE",
    "ROW_BITS",
    "OperationCompletion",
    "OperationKind",
    "PageFault",
    "PageOperation",
]

OPERATION_BYTES = 32
OPERATION_COMPLETION_BYTES = 8
ROW_BITS = 24
"""Bits of a row address on the bus."""
_NOBODY = PageTag(0, 0, 0)
_FIELDS = {
    "kind": "B", "channel": "B", "lun": "B", "page_log2": "B", "row": "I", "address": "Q",
    "sequence": "I", "layer": "H", "head": "H", "index": "I", "page_kind": "B", "second": "B",
}  # fmt: skip

OPERATION_FIELDS: dict[str, int] = {name: 8 * struct.calcsize(code) for name, code in _FIELDS.items()}
"""Bits of each field of a record, in their order; what follows is reserved: written as 0, ignored."""


class OperationKind(IntEnum):
    """Action of an operation; 0 is no operation, so that a record of zeros does nothing."""

    PROGRAM = 1
    """Write the sealed page at `address` to an erased page; rows of a block in ascending order."""
    ERASE = 2
    """Erase the block of the page."""
    READ = 3
    """Write the page, corrected and sealed, to `address`."""


class PageFault(IntFlag):
    """Error of one operation; others are not touched."""

    DESCRIPTOR = 1 << 0
    """A field of the record is outside its range: nothing was done."""
    MEMORY = 1 << 1
    """The memory answered with SLVERR or DECERR."""
    FAILED = 1 << 2
    """The LUN reports that its program or erase failed (status bit FAIL)."""
    TIMEOUT = 1 << 3
    """The lun never became ready."""
    UNCORRECTABLE = 1 << 4
    """READ: a codeword has more bit errors than the code corrects."""
    MISDIRECTED = 1 << 5
    """READ: a codeword is whole but not of this page_tag, page and number. PROGRAM: one in memory was not."""


PAGE_FAULT_ADVICE: dict[PageFault, str] = {
    PageFault.DESCRIPTOR: "check channel, lun, row, page size and address against docs/contracts/attention.md",
    PageFault.MEMORY: "check that the address lies in the memory that the kernel reaches",
    PageFault.FAILED: "retire the block and write its pages to another one",
    PageFault.TIMEOUT: "the lun is dead: write to others, and reset the device",
    PageFault.UNCORRECTABLE: "the page is lost: recompute what it held, and retire the block",
    PageFault.MISDIRECTED: "the page is misdirected: check page_tag, page index and kind",
}


@dataclass(frozen=True)
class PageOperation:
    """One page to program or read, or one block to erase.

    Sealed codewords (docs/contracts/attention.md, 2) lie one after the other at byte address `address`, a multiple
    of 8. PageTag, index, kind and `second` are what their CRC covers; an erase needs none of it.
    """

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<" + "".join(_FIELDS.values()) + "2x")

    kind: OperationKind
    channel: int
    lun: int
    row: int
    """Of the page, or of any page of the block."""
    page_bytes: int
    address: int = 0
    page_tag: PageTag = _NOBODY
    index: int = 0
    """Page index of the page tag."""
    page_kind: PageKind = PageKind.TOKEN
    second: bool = False
    """V's page of a separate KV page group: its codewords are numbered after K's."""

    @property
    def sealed_bytes(self) -> int:
        """Bytes of the page in memory; 0 for an erase."""
        return 0 if self.kind is OperationKind.ERASE else self.page_bytes // CODEWORD_BYTES * SEALED_BYTES

    def pack(self) -> bytes:
        """The 32 bytes that the kernel reads. Raises CommandError for a field that does not fit its place."""
        try:
            return self.FORMAT.pack(
                self.kind, self.channel, self.lun, self.page_bytes.bit_length() - 1, self.row, self.address,
                self.page_tag.sequence, self.page_tag.layer, self.page_tag.head, self.index, self.page_kind,
                self.second, )  # fmt: skip
        except struct.error as error:
            raise CommandError(f"every field of a page operation must fit its place: {error}") from None

    def __str__(self) -> str:
        """Name the fault and its place."""
        return f"{self.kind.name.lower()} of channel {self.channel}, lun {self.lun}, row {self.row}"


@dataclass(frozen=True)
class OperationCompletion:
    """How one operation ended."""

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<II")

    faults: PageFault
    ended: bool = True
    """False in memory that the kernel has not written."""

    @classmethod
    def unpack(cls, record: bytes) -> "OperationCompletion":
        """The completion in a record of 8 bytes."""
        faults, ended = cls.FORMAT.unpack(record)
        return cls(PageFault(faults), bool(ended))

    def pack(self) -> bytes:
        """The record of 8 bytes."""
        return self.FORMAT.pack(self.faults, self.ended)
