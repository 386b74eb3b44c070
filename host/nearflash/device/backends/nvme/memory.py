"""Subsystem Local Memory of an NVMe drive: ranges that the host chooses, moved by Memory Write, Read and Copy.

There is no window for direct I/O; `NvmeBuffer.copy_from` has the drive copy logical blocks into a buffer itself.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import AddressError, CommandError
from nearflash.device.backends.buffers import BoardMemory, OwnedBuffer
from nearflash.device.backends.nvme.drive import NvmeDrive
from nearflash.device.backends.nvme.entries import MEMORY_COPY, MEMORY_READ, MEMORY_WRITE, Opcode, copy_sources
from nearflash.device.base import LinkBytes
from nearflash.device.memory import PAGE_BYTES, AddressRanges, anonymous

__all__ = ["CHUNK_BYTES", "LocalMemory", "NvmeBuffer"]

CHUNK_BYTES = 128 << 10
"""Most that one command moves over the link: every controller that Linux drives takes as much."""
_DWORD_BYTES = 4
_MOST_SOURCES, _MOST_BLOCKS = 256, 1 << 16
"""Of one Memory Copy, and of one source of it."""
_BLOCK_FORMAT = 2


class LocalMemory(BoardMemory):
    """The memory namespace `namespace` of a drive, of `size_bytes`. Its first page is left out: no buffer is at 0."""

    def __init__(self, drive: NvmeDrive, namespace: int, size_bytes: int) -> None:
        super().__init__()
        self.drive, self.namespace, self.size_bytes = drive, namespace, size_bytes
        self.ranges = AddressRanges(PAGE_BYTES, size_bytes - PAGE_BYTES)

    def make(self, size_bytes: int, links: LinkBytes) -> "NvmeBuffer":
        """A buffer. Raises AddressError where there is no room."""
        return NvmeBuffer(self, self.ranges.take(size_bytes), size_bytes, links)

    def read(self, address: int, memory: NDArray[np.uint8]) -> None:
        """Fill whole dwords from an address, a multiple of 4."""
        self._move(MEMORY_READ, address, memory)

    def write(self, address: int, memory: NDArray[np.uint8]) -> None:
        """Write whole dwords to an address, a multiple of 4."""
        self._move(MEMORY_WRITE, address, memory)

    def _move(self, opcode: Opcode, address: int, memory: NDArray[np.uint8]) -> None:
        for start in range(0, memory.size, CHUNK_BYTES):
            part = memory[start : start + CHUNK_BYTES]
            self.drive.submit(opcode.pack(self.namespace, address=address + start, length=part.size), part)


class NvmeBuffer(OwnedBuffer):
    """A range of local memory, and the host's copy of it."""

    def __init__(self, memory: LocalMemory, address: int, size_bytes: int, links: LinkBytes) -> None:
        self._memory, self.address, self.size_bytes, self._links = memory, address, size_bytes, links
        self.host, self.p2p = anonymous(size_bytes), None

    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Write host bytes. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        if span.stop == span.start:
            return
        whole = _dwords(span)
        data = self.host[whole]
        if whole != span or data.size % _DWORD_BYTES:  # bytes beside them stay as they are there
            data = self._fetch(whole)
            data[span.start - whole.start :][: span.stop - span.start] = self.host[span]
        self._memory.write(self.address + whole.start, data)
        self._links.to_device += span.stop - span.start

    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Read device bytes. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        if span.stop > span.start:
            whole = _dwords(span)
            self.host[span] = self._fetch(whole)[span.start - whole.start :][: span.stop - span.start]
        self._links.from_device += span.stop - span.start

    def copy_from(self, namespace: int, runs: Mapping[int, int], block_bytes: int, offset: int = 0) -> None:
        """Have the drive copy logical blocks of another of its namespaces into the buffer; none cross the link.

        runs: numbers of blocks by the first of them, in the order in which they go from `offset`, a multiple of 4, on.
        block_bytes: of that namespace. Raises AddressError outside the buffer, CommandError, DeviceError.
        """
        pieces = _pieces(runs)
        self.span(offset, sum(blocks for _, blocks in pieces) * block_bytes)
        if offset % _DWORD_BYTES:
            raise AddressError(f"offset of a copy must be a multiple of {_DWORD_BYTES}, not {offset}")
        address = self.address + offset
        for start in range(0, len(pieces), _MOST_SOURCES):
            part = dict(pieces[start : start + _MOST_SOURCES])
            length = sum(part.values()) * block_bytes
            entry = MEMORY_COPY.pack(self._memory.namespace, length=length, address=address, count=len(part) - 1,
                                     format=_BLOCK_FORMAT)  # fmt: skip
            self._memory.drive.submit(entry, np.frombuffer(copy_sources(namespace, part), np.uint8))
            address += length

    def release(self) -> None:
        """Give the range back."""
        self._memory.ranges.give(self.address)

    def _fetch(self, whole: slice) -> NDArray[np.uint8]:
        data = anonymous(whole.stop - whole.start)
        self._memory.read(self.address + whole.start, data)
        return data


def _dwords(span: slice) -> slice:
    """Whole dwords around a range; a buffer's pages have them."""
    return slice(span.start // _DWORD_BYTES * _DWORD_BYTES, -(-span.stop // _DWORD_BYTES) * _DWORD_BYTES)


def _pieces(runs: Mapping[int, int]) -> list[tuple[int, int]]:
    """Runs that fit a source each. Raises CommandError for one without blocks."""
    if not runs or min(runs.values()) < 1:
        raise CommandError(f"runs must have at least a block each, not {dict(runs)!r:.80}")
    return [
        (first + start, min(blocks - start, _MOST_BLOCKS))
        for first, blocks in runs.items()
        for start in range(0, blocks, _MOST_BLOCKS)
    ]
