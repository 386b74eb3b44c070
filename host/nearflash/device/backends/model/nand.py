"""NAND of the attend kernel's model: what page operations leave on it (docs/contracts/attention.md, 2).

A lun fails what a real one does not do: a page is programmed once between two erases of its block, and above all pages
of the block that are programmed. Other faults are those that a test injects: `marked`, `fails`, `read_limit`.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import (
    CODEWORD_BYTES,
    MESSAGE_BYTES,
    RAW_BYTES,
    SEALED_BYTES,
    PageKind,
    PageTag,
)
from nearflash.abi.attention.page_operation import OPERATION_FIELDS, ROW_BITS, OperationKind, PageFault, PageOperation
from nearflash.abi.errors import AddressError
from nearflash.abi.kernel.config import AttendConfig
from nearflash.model.nand.codeword import check
from nearflash.model.nand.scramble import scrambling

__all__ = ["PAGES_PER_BLOCK", "NandBlock", "SimulatedNand"]

Bytes = NDArray[np.uint8]
NandBlock = tuple[int, int, int]
"""Channel, lun, block."""
PAGES_PER_BLOCK = 768
"""By default, as of the NAND that the simulated gateware of `attend-tiny` has."""
_INDEX_BITS = 20
_NONE = np.empty((0, SEALED_BYTES), np.uint8)


def _never(_: OperationKind, __: NandBlock) -> bool:
    return False


class SimulatedNand:
    """Sealed pages by (channel, lun, row)."""

    def __init__(self, pages_per_block: int = PAGES_PER_BLOCK) -> None:
        self.pages_per_block = pages_per_block
        self.erases: dict[NandBlock, int] = {}
        self.programs = 0
        self.marked: set[NandBlock] = set()
        """Blocks with the factory's mark in their first page: programs and erases of them fail."""
        self.fails: Callable[[OperationKind, NandBlock], bool] = _never
        """Asked at each program and erase whether it fails; what it raises ends the operation in its middle."""
        self.reads: Counter[NandBlock] = Counter()
        """Of a block's pages since its erase."""
        self.read_limit: int | None = None
        """Reads of a block after which its pages have more wrong bits than can be corrected."""
        self._blocks: dict[NandBlock, dict[int, Bytes]] = {}
        self._damaged: set[tuple[int, int, int]] = set()
        """Pages (channel, lun, row) whose program, or whose block's erase, did not end well."""

    def pages(self) -> list[tuple[int, int, int]]:
        """Pages (channel, lun, row) that are not erased."""
        return [(*block[:2], row) for block, rows in self._blocks.items() for row in rows]

    def page(self, channel: int, lun: int, row: int) -> Bytes:
        """Sealed codewords (codewords, 528); none where the page is erased."""
        return self._blocks.get((channel, lun, row // self.pages_per_block), {}).get(row, _NONE)

    def run(self, record: bytes, config: AttendConfig, memory: Callable[[int, int], Bytes]) -> PageFault:
        """Run the operation of a 32-byte record; `memory` gives the bytes at (address, size) or raises AddressError."""
        operation = _operation(record, config)
        if operation is None:
            return PageFault.DESCRIPTOR
        erase_block = operation.channel, operation.lun, operation.row // self.pages_per_block
        if operation.kind is OperationKind.ERASE:
            return self._erase(erase_block)
        try:
            sealed = memory(operation.address, operation.sealed_bytes).reshape(-1, SEALED_BYTES)
        except AddressError:
            return PageFault.MEMORY
        if operation.kind is OperationKind.READ:
            return self._read(operation, sealed)
        return self._program(operation, erase_block, sealed)

    def _erase(self, block: NandBlock) -> PageFault:
        self.erases[block] = self.erases.get(block, 0) + 1
        pages = {(*block[:2], row) for row in self._blocks.get(block, {})}
        self._damaged |= pages
        if self._has_failed(OperationKind.ERASE, block):
            return PageFault.FAILED
        self._damaged -= pages
        self._blocks.pop(block, None)
        self.reads[block] = 0
        return PageFault(0)

    def _program(self, one: PageOperation, at: NandBlock, sealed: Bytes) -> PageFault:
        self.programs += 1
        block, page = self._blocks.setdefault(at, {}), (one.channel, one.lun, one.row)
        if block and one.row <= max(block):
            return PageFault.FAILED
        block[one.row] = sealed.copy()
        self._damaged.add(page)
        if self._has_failed(OperationKind.PROGRAM, at):
            return PageFault.FAILED
        self._damaged.discard(page)
        return _foreign(one, sealed)

    def _has_failed(self, kind: OperationKind, block: NandBlock) -> bool:
        return block in self.marked or self.fails(kind, block)

    def _read(self, one: PageOperation, sealed: Bytes) -> PageFault:
        block, where = (one.channel, one.lun, one.row // self.pages_per_block), (one.channel, one.lun, one.row)
        self.reads[block] += 1
        page = self.page(*where)[: len(sealed)]
        if not len(page):
            sealed[:] = _make_erased_page(one, marked=block in self.marked and one.row % self.pages_per_block == 0)
            return PageFault.UNCORRECTABLE
        sealed[: len(page)] = page
        if where in self._damaged or (self.read_limit is not None and self.reads[block] > self.read_limit):
            sealed ^= 0xFF
            return PageFault.UNCORRECTABLE
        return _foreign(one, page) | (PageFault.UNCORRECTABLE if len(page) < len(sealed) else PageFault(0))


def _make_erased_page(one: PageOperation, *, marked: bool) -> Bytes:
    """A page of ones as the kernel reads it: scrambled. The mark is a byte of zeros behind the data."""
    places = np.arange(one.page_bytes // CODEWORD_BYTES)
    raw = np.full((len(places), RAW_BYTES), 0xFF, np.uint8)
    if marked:
        raw.reshape(-1)[one.page_bytes] = 0
    sealed = np.zeros((len(places), SEALED_BYTES), np.uint8)
    sealed[:, :MESSAGE_BYTES] = (raw ^ scrambling(one.row, one.lun, places))[:, :MESSAGE_BYTES]
    return sealed


def _foreign(one: PageOperation, sealed: Bytes) -> PageFault:
    first = one.page_bytes // CODEWORD_BYTES if one.second else 0
    wrong = check(sealed, one.page_tag, one.index, one.page_kind, first=first).misdirected
    return PageFault.MISDIRECTED if wrong.any() else PageFault(0)


def _operation(record: bytes, config: AttendConfig) -> PageOperation | None:
    """The operation of a record; None where it breaks a rule."""
    fields, start = {}, 0
    for name, bits in OPERATION_FIELDS.items():
        fields[name] = int.from_bytes(record[start : start + bits // 8], "little")
        start += bits // 8
    legal = (
        fields["kind"] in set(OperationKind)
        and fields["channel"] < config.channels
        and fields["lun"] < config.luns
        and 4096 <= 1 << fields["page_log2"] <= config.page_bytes
        and fields["row"] < 1 << ROW_BITS
        and fields["address"] % 8 == 0
        and fields["address"] < 1 << 48
        and fields["index"] < 1 << _INDEX_BITS
        and fields["page_kind"] <= 1
        and fields["second"] <= 1
    )
    if not legal:
        return None
    page_tag = PageTag(fields["sequence"], fields["layer"], fields["head"])
    return PageOperation(
        OperationKind(fields["kind"]), fields["channel"], fields["lun"], fields["row"], 1 << fields["page_log2"],
        fields["address"], page_tag, fields["index"], PageKind(fields["page_kind"]), bool(fields["second"]),
    )  # fmt: skip
