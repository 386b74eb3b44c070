"""NAND of the attend kernel's model: what page operations leave on it (docs/contracts/attention.md, 2).

A lun fails what a real one does not do: a page is programmed once between two erases of its block, and above all pages
of the block that are programmed.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import CODEWORD_BYTES, SEALED_BYTES, PageKind, PageTag
from nearflash.abi.attention.page_operation import OPERATION_FIELDS, ROW_BITS, OperationKind, PageFault, PageOperation
from nearflash.abi.errors import AddressError
from nearflash.abi.kernel.config import AttendConfig
from nearflash.model.nand.codeword import check

__all__ = ["PAGES_PER_BLOCK", "SimulatedNand"]

Bytes = NDArray[np.uint8]
PAGES_PER_BLOCK = 768
"""By default, as of the NAND that the simulated gateware of `attend-tiny` has."""
_INDEX_BITS = 20
_NONE = np.empty((0, SEALED_BYTES), np.uint8)


class SimulatedNand:
    """Sealed pages by (channel, lun, row)."""

    def __init__(self, pages_per_block: int = PAGES_PER_BLOCK) -> None:
        self.pages_per_block = pages_per_block
        self.erases: dict[tuple[int, int, int], int] = {}
        """By (channel, lun, block)."""
        self._blocks: dict[tuple[int, int, int], dict[int, Bytes]] = {}

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
            self._blocks.pop(erase_block, None)
            self.erases[erase_block] = self.erases.get(erase_block, 0) + 1
            return PageFault(0)
        try:
            sealed = memory(operation.address, operation.sealed_bytes).reshape(-1, SEALED_BYTES)
        except AddressError:
            return PageFault.MEMORY
        if operation.kind is OperationKind.READ:
            return self._read(operation, sealed)
        block = self._blocks.setdefault(erase_block, {})
        if block and operation.row <= max(block):
            return PageFault.FAILED
        block[operation.row] = sealed.copy()
        return _foreign(operation, sealed)

    def _read(self, one: PageOperation, sealed: Bytes) -> PageFault:
        page = self.page(one.channel, one.lun, one.row)[: len(sealed)]
        sealed[: len(page)] = page
        return _foreign(one, page) | (PageFault.UNCORRECTABLE if len(page) < len(sealed) else PageFault(0))


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
