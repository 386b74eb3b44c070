"""Device memory held in the host's RAM: what the model, the host path and the simulated gateware compute in.

A buffer's host copy and its device range are different bytes, as on a board: a forgotten sync shows as stale data,
and every sync is counted as traffic of the host link.
"""

import mmap
import sys
from abc import ABC, abstractmethod
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import AddressError
from nearflash.device.base import Buffer, LinkBytes

__all__ = ["DEFAULT_BYTES", "PAGE_BYTES", "AddressRanges", "Memory", "SimulatedBuffer", "SimulatedMemory", "anonymous"]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # named from Python 3.13 on
DEFAULT_BYTES = 4 << 30 if sys.maxsize > 1 << 32 else 256 << 20
"""Default size of a simulated memory, bytes: one DDR4 bank of a SmartSSD. Untouched pages cost nothing, but addresses,
of which a 32-bit processor has few."""


def anonymous(size_bytes: int) -> NDArray[np.uint8]:
    """Zeroed, page-aligned bytes from the operating system, fit for direct I/O.

    From 2 MiB on they are in huge pages, where the system has them: direct I/O then costs a seventh of the processor
    time, since a request is a few pieces in place of hundreds.
    """
    huge = size_bytes >= HUGE_PAGE_BYTES
    # Whole huge pages: Linux aligns them.
    length = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if huge else size_bytes
    # Neighbouring mappings become one, and Linux refuses a fork while one mapping with a reserve exceeds all memory.
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if huge:
        with suppress(OSError, AttributeError):  # a kernel, or a system, without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, size_bytes)


class Memory(ABC):
    """Source of a device's buffers."""

    size_bytes: int

    @abstractmethod
    def allocate(self, size_bytes: int, links: LinkBytes) -> Buffer:
        """A buffer whose syncs are counted in `links`. Raises AddressError when there is no room."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Take the buffer's range back."""


class SimulatedBuffer(Buffer):
    """A range of a SimulatedMemory."""

    def __init__(self, address: int, device: NDArray[np.uint8], links: LinkBytes) -> None:
        self.address = address
        self.size_bytes = device.size
        self.host = anonymous(device.size)
        self.p2p: NDArray[np.uint8] = device
        self._links = links

    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copy host bytes down. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        self.p2p[span] = self.host[span]
        self._links.to_device += span.stop - span.start

    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copy device bytes up. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        self.host[span] = self.p2p[span]
        self._links.from_device += span.stop - span.start


class AddressRanges:
    """Which pages of a memory at [base, base + size_bytes) are taken: first fit."""

    def __init__(self, base: int, size_bytes: int) -> None:
        self._free, self._size_bytes = [(base, size_bytes)], size_bytes
        self._taken: dict[int, int] = {}

    def take(self, size_bytes: int) -> int:
        """The lowest address where so many bytes fit, in whole pages. Raises AddressError when there is no room."""
        if size_bytes <= 0:
            raise AddressError(f"a buffer's size must be at least 1 byte, not {size_bytes!r}")
        needed = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        for i, (address, size) in enumerate(self._free):
            if needed <= size:
                self._free[i : i + 1] = [(address + needed, size - needed)] if needed < size else []
                self._taken[address] = needed
                return address
        largest = max((size for _, size in self._free), default=0)
        raise AddressError(
            f"a buffer must fit the largest free range of the device memory, {largest} of {self._size_bytes} bytes, "
            f"not {size_bytes}; free other buffers first"
        )

    def give(self, address: int) -> None:
        """Take a range back. Raises AddressError for one that was not taken."""
        taken = self._taken.pop(address, None)
        if taken is None:
            raise AddressError(f"a buffer must be allocated to be freed, not at {address:#x} (freed twice?)")
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (address, taken)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged


class SimulatedMemory(Memory):
    """Bytes at device addresses [base, base + size_bytes), handed out first fit in pages.

    storage: uint8, (size_bytes,), page aligned, when the bytes exist already (a simulator's memory); else they are
    taken from the operating system. Address 0 is left out, so that an address that was never set is caught.
    """

    def __init__(
        self, size_bytes: int = DEFAULT_BYTES, *, base: int = PAGE_BYTES, storage: NDArray[np.uint8] | None = None
    ) -> None:
        self.storage = anonymous(size_bytes) if storage is None else storage
        self.size_bytes = self.storage.size
        self.base = base
        if self.storage.ctypes.data % PAGE_BYTES or self.size_bytes % PAGE_BYTES or base % PAGE_BYTES:
            raise AddressError(f"a memory must begin and end at multiples of {PAGE_BYTES} bytes")
        self._ranges = AddressRanges(base, self.size_bytes)

    def allocate(self, size_bytes: int, links: LinkBytes) -> SimulatedBuffer:
        """A buffer at the lowest address where it fits. Raises AddressError when there is no room."""
        address = self._ranges.take(size_bytes)
        return SimulatedBuffer(address, self.view(address, size_bytes), links)

    def free(self, buffer: Buffer) -> None:
        """Take the buffer's range back. Raises AddressError for one that is not allocated here."""
        self._ranges.give(buffer.address)

    def view(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """The bytes at [address, address + size_bytes), (size_bytes,), for what computes in this memory."""
        return self.storage[address - self.base : address - self.base + size_bytes]
