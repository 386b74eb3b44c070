"""Buffer objects of XRT as device memory.

With P2P, a buffer is a window of the card's PCIe BAR: loads and stores on it, and direct I/O of a drive, reach the
card's memory. XRT moves no data of such a buffer by DMA (its driver rejects the sync), so the host's copy goes through
the window, too. Without P2P, the host's copy is XRT's own and syncs are DMA.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import AddressError, DeviceError
from nearflash.device.backends.buffers import BoardMemory, OwnedBuffer
from nearflash.device.backends.xrt.card import XrtCard
from nearflash.device.backends.xrt.functions import FROM_DEVICE, NORMAL, P2P, TO_DEVICE
from nearflash.device.base import LinkBytes
from nearflash.device.memory import DEFAULT_BYTES, PAGE_BYTES, anonymous

__all__ = ["DmaBuffer", "P2pBuffer", "XrtBuffer", "XrtMemory"]


class XrtBuffer(OwnedBuffer):
    """A buffer object."""

    def __init__(self, card: XrtCard, size_bytes: int, flags: int, group: int, links: LinkBytes) -> None:
        self._card, self._links, self.size_bytes = card, links, size_bytes
        call, rounded = card.functions.call, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self.handle = call("xrtBOAlloc", card.device, rounded, flags, group, to=f"allocate {size_bytes} bytes")
        try:
            address = call("xrtBOAddress", self.handle, to="give a buffer's address")
            mapped = call("xrtBOMap", self.handle, to="map a buffer")
        except DeviceError:
            self.release()
            raise
        self.address = int(address)
        self.mapped: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(mapped))

    def release(self) -> None:
        """Free the buffer object: its views must not be used afterwards."""
        self._card.functions.call("xrtBOFree", self.handle, to="free a buffer")


class P2pBuffer(XrtBuffer):
    """A window to the card's memory."""

    def __init__(self, card: XrtCard, size_bytes: int, group: int, links: LinkBytes) -> None:
        super().__init__(card, size_bytes, P2P, group, links)
        self.p2p = self.mapped
        self.host = anonymous(size_bytes)

    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Store host bytes through the window. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        self.mapped[span] = self.host[span]
        if span.stop > span.start:
            self.mapped[span.stop - 1].item()  # stores are posted: a read comes back after they have arrived
        self._links.to_device += span.stop - span.start

    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """Load device bytes through the window. Raises AddressError outside the buffer."""
        span = self.span(offset, size_bytes)
        self.host[span] = self.mapped[span]
        self._links.from_device += span.stop - span.start


class DmaBuffer(XrtBuffer):
    """XRT's copy in host memory, and DMA to and from the card's."""

    def __init__(self, card: XrtCard, size_bytes: int, group: int, links: LinkBytes) -> None:
        super().__init__(card, size_bytes, NORMAL, group, links)
        self.p2p = None
        self.host = self.mapped

    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """DMA of host bytes to the card. Raises AddressError outside the buffer, DeviceError."""
        span = self._sync(TO_DEVICE, offset, size_bytes)
        self._links.to_device += span.stop - span.start

    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        """DMA of device bytes to the host. Raises AddressError outside the buffer, DeviceError."""
        span = self._sync(FROM_DEVICE, offset, size_bytes)
        self._links.from_device += span.stop - span.start

    def _sync(self, direction: int, offset: int, size_bytes: int | None) -> slice:
        span = self.span(offset, size_bytes)
        if span.stop > span.start:
            size = span.stop - span.start
            self._card.functions.call("xrtBOSync", self.handle, direction, size, span.start, to="copy a buffer by DMA")
        return span


class XrtMemory(BoardMemory):
    """The bank `group` of a card. `p2p` states whether buffers are windows; a card without P2P gives none."""

    def __init__(self, card: XrtCard, group: int, *, p2p: bool, size_bytes: int = DEFAULT_BYTES) -> None:
        super().__init__()
        self._card, self._group, self.size_bytes = card, group, size_bytes
        self.p2p = p2p and self._has_windows()

    def make(self, size_bytes: int, links: LinkBytes) -> XrtBuffer:
        """A buffer object. Raises AddressError where there is no room."""
        kind = P2pBuffer if self.p2p else DmaBuffer
        try:
            return kind(self._card, size_bytes, self._group, links)
        except DeviceError as full:
            raise AddressError(f"a buffer of {size_bytes} bytes must fit the card's memory: {full}") from full

    def _has_windows(self) -> bool:
        try:
            P2pBuffer(self._card, PAGE_BYTES, self._group, LinkBytes()).release()
        except DeviceError:
            return False
        return True
