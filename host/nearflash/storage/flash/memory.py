"""Flash in a device's memory: sealed codewords, as the attend kernel reads them there (the SmartSSD case)."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import SEALED_BYTES
from nearflash.abi.attention.pages import PageEntry
from nearflash.device.base import Device
from nearflash.storage.flash.base import Flash, ProgramOrder, check_pages
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.page import PageData, PageKeys, PageWrites, header_keys, seal_codewords, unseal_pages

__all__ = ["MemoryFlash", "memory_entries"]

_MEMORY, _CHANNEL = (np.uint64(entry.pack()) for entry in (PageEntry(0, address=0), PageEntry(1)))
"""A page entry's word is the sum of these, times channel, and the address."""


def memory_entries(addresses: NDArray[np.int64], channels: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Words of page entries for pages in memory; a channel is the engine that computes with the page."""
    return _MEMORY + addresses.astype(np.uint64) + channels.astype(np.uint64) * _CHANNEL


class MemoryFlash(Flash):
    """Pages one after the other in a buffer of `device`: all of its traffic crosses the host link.

    A channel is only the engine that computes with a page. A device's calls come from one thread, and so must a
    MemoryFlash's. Raises AddressError where the device's memory has no room.
    """

    def __init__(self, device: Device, geometry: FlashGeometry) -> None:
        self.geometry, self._device = geometry, device
        self._page_bytes = geometry.codewords * SEALED_BYTES
        self._buffer = device.allocate(geometry.pages * self._page_bytes)
        self._order = ProgramOrder(geometry)
        self._pages = self._buffer.host.reshape(geometry.pages, geometry.codewords, SEALED_BYTES)
        self._open = True

    def program(self, pages: PageNumbers, batch: PageWrites) -> None:
        """See Flash.program."""
        self._order.check(pages)
        self._pages[pages] = seal_codewords(batch)
        for run in self.geometry.runs(pages):
            self._buffer.sync_to_device(int(pages[run.start]) * self._page_bytes, len(pages[run]) * self._page_bytes)
        self._order.add(pages)

    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """See Flash.read."""
        ordered = np.sort(pages)
        for run in self.geometry.runs(ordered):
            start, count = int(ordered[run.start]), run.stop - run.start
            self._buffer.sync_from_device(start * self._page_bytes, count * self._page_bytes)
        sealed = self._pages[pages]
        read, valid = unseal_pages(sealed, expected)
        check_pages(pages, expected, self._order.are_erased(pages), header_keys(read.aux)[0], valid)
        return read

    def erase(self, block: int) -> None:
        """See Flash.erase."""
        size = self.geometry.pages_per_block
        self._pages[block * size : (block + 1) * size] = 0
        self._buffer.sync_to_device(block * size * self._page_bytes, size * self._page_bytes)
        self._order.erase(block)

    def entry(self, page: int) -> PageEntry:
        """See Flash.entry."""
        block = page // self.geometry.pages_per_block
        return PageEntry(block % self.geometry.channels, address=self._buffer.address + page * self._page_bytes)

    def entries(self, pages: PageNumbers) -> NDArray[np.uint64]:
        """See Flash.entries."""
        channels = pages // self.geometry.pages_per_block % self.geometry.channels
        return memory_entries(self._buffer.address + pages * self._page_bytes, channels)

    def sync(self) -> None:
        """See Flash.sync: memory is not durable."""

    def close(self) -> None:
        """See Flash.close."""
        if self._open:
            self._open = False
            self._device.free(self._buffer)
