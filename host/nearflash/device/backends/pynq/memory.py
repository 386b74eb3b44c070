"""Buffers of `pynq.allocate` as device memory: contiguous DRAM that the processors and the kernel share.

The mapping is not cached, so `p2p` is the DRAM itself; flush and invalidate are called all the same, for boards whose
PYNQ maps it otherwise.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import AddressError
from nearflash.device.backends.buffers import BoardMemory, OwnedBuffer
from nearflash.device.base import LinkBytes
from nearflash.device.memory import PAGE_BYTES, anonymous

__all__ = ["PynqBuffer", "PynqMemory"]

Allocate = Callable[[int], Any]


class PynqBuffer(OwnedBuffer):
    """An array of `pynq.allocate`, and the host's copy of it."""

    def __init__(self, array: Any, size_bytes: int, p2p: bool, links: LinkBytes) -> None:
        self.array, self.size_bytes, self._links = array, size_bytes, links
        self.address = int(array.device_address)
        self._bytes: NDArray[np.uint8] = np.asarray(array).view(np.ndarray)[:size_bytes]
        self.host = anonymous(size_bytes)
        self.p2p = self._bytes if p2p else None

    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copy host bytes into the shared DRAM. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        self._bytes[span] = self.host[span]
        self.array.flush()
        self._links.to_device += span.stop - span.start

    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copy bytes of the shared DRAM into the host's. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        self.array.invalidate()
        self.host[span] = self._bytes[span]
        self._links.from_device += span.stop - span.start

    def release(self) -> None:
        """Free the array: the buffer's views must not be used afterwards."""
        self.array.freebuffer()


class PynqMemory(BoardMemory):
    """Buffers that `allocate` gives, from bytes to an array of them. `p2p`: buffers have a window for direct I/O."""

    def __init__(self, allocate: Allocate, size_bytes: int, *, p2p: bool) -> None:
        super().__init__()
        self._allocate, self.size_bytes, self.p2p = allocate, size_bytes, p2p

    def make(self, size_bytes: int, links: LinkBytes) -> PynqBuffer:
        """A buffer of whole pages. Raises AddressError where there is no room."""
        try:
            array = self._allocate(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
        except (MemoryError, RuntimeError, OSError) as full:
            raise AddressError(
                f"a buffer of {size_bytes} bytes must fit what is left of the contiguous memory (`grep Cma "
                f"/proc/meminfo`), not fail: {full}; free other buffers, or boot with a larger cma="
            ) from full
        return PynqBuffer(array, size_bytes, self.p2p, links)
