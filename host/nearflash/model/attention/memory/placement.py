"""Placement of pages: in memory one after the other, or on NAND over LUNs and rows of a channel.

Both hand out places for ever: nothing is freed. Several heads share one store.
"""

from typing import Protocol

from nearflash.abi.attention.codeword import CODEWORD_BYTES, SEALED_BYTES
from nearflash.abi.attention.pages import PageEntry

__all__ = ["MemoryStore", "NandStore", "PageStore"]


class PageStore(Protocol):
    """Gives places to pages."""

    channels: int

    def take(self, channel: int, pages: int, page_bytes: int) -> PageEntry:
        """Place of one page, or of two that one request reads, on `channel` (modulo the channels)."""


class MemoryStore:
    """Sealed codewords in memory from byte address `base` (a multiple of 8) on; channels are only who computes."""

    def __init__(self, base: int, channels: int) -> None:
        self.channels = channels
        self.end = base
        """Byte address after what was taken."""

    def take(self, channel: int, pages: int, page_bytes: int) -> PageEntry:
        """The next bytes; a second page lies directly after the first."""
        entry = PageEntry(channel % self.channels, address=self.end)
        self.end += pages * page_bytes // CODEWORD_BYTES * SEALED_BYTES
        return entry


class NandStore:
    """Raw codewords on NAND: the pages of a channel go round its `luns`, from row `first_row` on.

    Two pages of one request lie at the same row of sibling LUNs (lun XOR 1), the first on the even one.
    """

    def __init__(self, channels: int, luns: int, first_row: int = 0) -> None:
        self.channels = channels
        self._rows = [[first_row] * luns for _ in range(channels)]
        self._next = [0] * channels

    def take(self, channel: int, pages: int, page_bytes: int) -> PageEntry:
        """The next LUN's next row; of siblings the row that is free on both."""
        channel %= self.channels
        rows, lun = self._rows[channel], self._next[channel]
        if pages == 2:
            lun = (lun + 1) % len(rows) & ~1
        row = max(rows[lun : lun + pages])
        rows[lun : lun + pages] = [row + 1] * pages
        self._next[channel] = (lun + pages) % len(rows)
        return PageEntry(channel, lun, row)
