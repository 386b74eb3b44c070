"""NAND of an attend kernel: pages programmed from the host, read back, and blocks erased.

Pages are sealed (docs/contracts/attention.md, 2); the kernel adds parity and scrambles, and takes both away again.
Rows of a block are programmed in ascending order, each once between two erases of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import (
    CODEWORD_BYTES,
    RAW_BYTES,
    SEALED_BYTES,
    PageKind,
    PageTag,
    scramble_byte,
)
from nearflash.abi.attention.page_batch import PageBatch
from nearflash.abi.attention.page_operation import (
    OPERATION_BYTES,
    OPERATION_COMPLETION_BYTES,
    PAGE_FAULT_ADVICE,
    OperationKind,
    PageFault,
    PageOperation,
)
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import CommandError, DeviceError, ShapeError
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.base import Buffer, Device

__all__ = [
    "NandError",
    "NandPage",
    "are_marked_bad",
    "attempt",
    "erase",
    "operate",
    "program",
    "read",
    "try_read",
]

Bytes = NDArray[np.uint8]

_START_BYTES = 128
"""Records lie at a multiple of this, completions at one of 32."""
_BATCH_OPERATIONS = 1024
_TIMEOUT_S = 600.0
_MARK_BITS = 7
"""A mark has fewer ones than this."""
_NO_PAGE = np.empty((0, SEALED_BYTES), np.uint8)


class NandError(DeviceError):
    """Operations that ended with a fault; all others of the same call were done."""

    def __init__(self, faults: dict[PageOperation, PageFault]) -> None:
        self.faults = faults
        operation, page_fault = next(iter(faults.items()))
        first = next(fault for fault in PageFault if fault & page_fault)
        names = ", ".join(str(fault.name) for fault in PageFault if fault & page_fault)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"{operation} must end without fault, not {names}{more}: {PAGE_FAULT_ADVICE[first]}")


@dataclass(frozen=True)
class NandPage:
    """Place of a page on NAND, and its page tag. Raises CommandError for an entry in memory."""

    entry: PageEntry
    page_tag: PageTag
    index: int
    """Page index: KV page group, or b·ceil(d/m) + j."""
    kind: PageKind
    second: bool = False
    """V's page of a separate KV page group."""

    def __post_init__(self) -> None:
        if self.entry.address is not None:
            raise CommandError(f"a page on NAND must have a lun and a row, not {self.entry}")


def program(device: Device, pages: Sequence[NandPage], sealed: Sequence[Bytes]) -> None:
    """Write sealed pages, each (codewords, 528) of 8, 16 or 32 codewords, to rows that are erased.

    Raises NandError (`faults` names those that failed), ShapeError, CommandError, WaitTimeoutError as Device.wait does.
    """
    for sealed_page in sealed:
        if sealed_page.ndim != 2 or sealed_page.shape[1] != SEALED_BYTES or len(sealed_page) not in (8, 16, 32):
            raise ShapeError(
                f"a sealed page must have the shape (8, 16 or 32, {SEALED_BYTES}), not {sealed_page.shape}"
            )
    operations = [
        _operation(OperationKind.PROGRAM, page, len(data) * CODEWORD_BYTES)
        for page, data in zip(pages, sealed, strict=True)
    ]
    operate(device, operations, sealed)


def read(device: Device, pages: Sequence[NandPage], page_bytes: int | None = None) -> list[Bytes]:
    """Sealed pages, each (codewords, 528), bit errors corrected; `page_bytes` is by default the build's page.

    Raises NandError, CommandError, WaitTimeoutError as `program`.
    """
    size = page_bytes or _config(device).page_bytes
    return operate(device, [_operation(OperationKind.READ, page, size) for page in pages])


def try_read(device: Device, pages: Sequence[NandPage]) -> tuple[list[Bytes], list[PageFault]]:
    """Sealed pages as they lie there, with their faults: also those that are damaged, erased or another's.

    Raises CommandError, WaitTimeoutError as `program`.
    """
    size = _config(device).page_bytes
    faults, found = attempt(device, [_operation(OperationKind.READ, page, size) for page in pages])
    return found, faults


def are_marked_bad(device: Device, blocks: Sequence[PageEntry], pages_per_block: int) -> list[bool]:
    """Which blocks, each named by its first page, carry the factory's mark, before anything was programmed to them.

    The mark is in the first byte behind the data of a block's first or last page: not FFh (ONFI 4.2, "Factory Defect
    Mapping"); one wrong bit is none. Pages whose codewords are whole were programmed and have no mark. Raises NandError
    for a LUN that never becomes ready, CommandError, WaitTimeoutError as `program`.
    """
    nobody, last = PageTag(0, 0, 0), pages_per_block - 1
    entries = [PageEntry(one.channel, one.lun, one.row + place) for one in blocks for place in (0, last)]
    pages, faults = try_read(device, [NandPage(entry, nobody, 0, PageKind.TOKEN) for entry in entries])
    dead = [(entry, fault) for entry, fault in zip(entries, faults, strict=True) if fault & PageFault.TIMEOUT]
    if dead:
        (entry, fault), size = dead[0], _config(device).page_bytes
        raise NandError({PageOperation(OperationKind.READ, entry.channel, entry.lun, entry.row, size): fault})
    marked = [
        bool(fault & PageFault.UNCORRECTABLE) and _has_mark(page, entry)
        for page, fault, entry in zip(pages, faults, entries, strict=True)
    ]
    return [first or other for first, other in zip(marked[::2], marked[1::2], strict=True)]


def _has_mark(page: Bytes, entry: PageEntry) -> bool:
    """Whether the first byte of the spare, below the scrambling that the kernel takes off, has zeros."""
    place, column = divmod(len(page) * CODEWORD_BYTES, RAW_BYTES)
    byte = int(page[place, column]) ^ scramble_byte(entry.row, entry.lun, place, column)
    return byte.bit_count() < _MARK_BITS


def erase(device: Device, blocks: Sequence[PageEntry]) -> None:
    """Erase blocks, each named by any of its pages. Raises NandError, CommandError, WaitTimeoutError as `program`."""
    size = _config(device).page_bytes
    operate(device, [PageOperation(OperationKind.ERASE, block.channel, block.lun, block.row, size) for block in blocks])


def operate(device: Device, operations: Sequence[PageOperation], sealed: Sequence[Bytes] = ()) -> list[Bytes]:
    """Run operations, programs with the page of `sealed` at the same place; the pages of reads.

    Operations of one lun are done in the order given, LUNs interleaved. Raises NandError, CommandError, ShapeError,
    WaitTimeoutError as `program`.
    """
    faults, pages = attempt(device, operations, sealed)
    if wrong := {operation: fault for operation, fault in zip(operations, faults, strict=True) if fault}:
        raise NandError(wrong)
    return [page for page, operation in zip(pages, operations, strict=True) if operation.kind is OperationKind.READ]


def attempt(
    device: Device, operations: Sequence[PageOperation], sealed: Sequence[Bytes] = ()
) -> tuple[list[PageFault], list[Bytes]]:
    """As `operate`; faults are results: of each operation its faults, and its page, empty for what is no read."""
    faults, read_pages = [PageFault(0)] * len(operations), [_NO_PAGE] * len(operations)
    order = _in_turns(operations)
    for start in range(0, len(order), _BATCH_OPERATIONS):
        places = order[start : start + _BATCH_OPERATIONS]
        batch = _Placed(device, [operations[index] for index in places])
        try:
            batch.fill([sealed[index] if index < len(sealed) else None for index in places])
            device.run(batch.batch, _TIMEOUT_S)
            completions, pages = batch.results()
        finally:
            device.free(batch.buffer)
        for at, fault, page in zip(places, completions, pages, strict=True):
            faults[at], read_pages[at] = fault, page
    return faults, read_pages


def _in_turns(operations: Sequence[PageOperation]) -> list[int]:
    """Places of operations: the first one of every lun, then the second ones, and so on."""
    seen: Counter[tuple[int, int]] = Counter()
    turns = []
    for operation in operations:
        turns.append(seen[operation.channel, operation.lun])
        seen[operation.channel, operation.lun] += 1
    return sorted(range(len(operations)), key=turns.__getitem__)


def _config(device: Device) -> AttendConfig:
    config = device.identity.config
    if not isinstance(config, AttendConfig):
        raise CommandError(f"page operations must go to an attend kernel with NAND, not to {device.identity.name}")
    return config


def _operation(kind: OperationKind, page: NandPage, page_bytes: int) -> PageOperation:
    entry = page.entry
    return PageOperation(kind, entry.channel, entry.lun, entry.row, page_bytes,
                         page_tag=page.page_tag, index=page.index, page_kind=page.kind, second=page.second)  # fmt: skip


class _Placed:
    """A batch in a buffer of its own: records, completions, pages."""

    def __init__(self, device: Device, operations: Sequence[PageOperation]) -> None:
        count = len(operations)
        self._completions = -(-count * OPERATION_BYTES // _START_BYTES) * _START_BYTES
        end = -(-(self._completions + count * OPERATION_COMPLETION_BYTES) // _START_BYTES) * _START_BYTES
        self._starts = []
        for operation in operations:
            self._starts.append(end)
            end += operation.sealed_bytes
        self.buffer: Buffer = device.allocate(end)
        self.buffer.host[self._completions : self._starts[0]] = 0
        self._operations = operations
        self.batch = self._place()

    def _place(self) -> PageBatch:
        address = self.buffer.address
        placed = (
            PageOperation(**vars(operation) | {"address": address + start if operation.sealed_bytes else 0})
            for operation, start in zip(self._operations, self._starts, strict=True)
        )
        return PageBatch(tuple(placed), address, address + self._completions)

    def fill(self, sealed: Sequence[Bytes | None]) -> None:
        """Records, and the pages of programs, go down. Raises ShapeError for a page that is missing or too short."""
        packed = np.frombuffer(self.batch.pack(), np.uint8)
        self.buffer.host[: len(packed)] = packed
        for operation, start, page in zip(self._operations, self._starts, sealed, strict=True):
            if operation.kind is OperationKind.PROGRAM:
                if page is None or page.size != operation.sealed_bytes:
                    raise ShapeError(f"{operation} must have {operation.sealed_bytes} bytes of sealed page, not {page}")
                self.buffer.host[start : start + operation.sealed_bytes] = page.reshape(-1)
        self.buffer.sync_to_device()

    def results(self) -> tuple[list[PageFault], list[Bytes]]:
        """Faults, and pages (codewords, 528); empty ones for what is no read."""
        buffer, pages = self.buffer, []
        records = slice(self._completions, self._completions + len(self._operations) * OPERATION_COMPLETION_BYTES)
        buffer.sync_from_device(records.start, records.stop - records.start)
        for operation, start in zip(self._operations, self._starts, strict=True):
            size = operation.sealed_bytes if operation.kind is OperationKind.READ else 0
            buffer.sync_from_device(start, size)
            pages.append(buffer.host[start : start + size].reshape(-1, SEALED_BYTES).copy())
        return [completion.faults for completion in self.batch.completions(bytes(buffer.host[records]))], pages
