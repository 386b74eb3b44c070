"""Flash on a device's own NAND, through its page operations."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import SEALED_BYTES, PageKind, PageTag
from nearflash.abi.attention.page_operation import PageFault
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.base import Device
from nearflash.device.drivers import pages as nand
from nearflash.storage.flash.base import ERASED, Flash, ProgramOrder, check_pages, wrong_pages
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.page import PageData, PageKeys, PageWrites, header_keys, seal_codewords, unseal_pages

__all__ = ["NandFlash"]

_REASONS = {
    PageFault.UNCORRECTABLE: "is damaged: it has more bit errors than can be corrected",
    PageFault.MISDIRECTED: "is another's",
}
_CHANNEL, _UNIT = (np.uint64(entry.pack()) for entry in (PageEntry(1), PageEntry(0, 1)))
"""A page entry's word is the sum of these, times channel and lun, and the row."""


class NandFlash(Flash):
    """Blocks of all luns of `device`, from NAND block `first_block` on.

    `paired` is for separate KV page groups: a block is two of sibling luns (lun XOR 1), its pages alternately on one
    and the other, so that V lies at K's row. A block is erased before its first use, unless all are erased already
    (`are_erased`). A device's calls come from one thread, and so must a NandFlash's. Raises CommandError for a device
    without NAND.

    Limits: a block whose program or erase fails is not replaced: NandError, which names it, ends the use of the flash.
    """

    def __init__(
        self, device: Device, *, pages_per_block: int, blocks_per_lun: int, paired: bool, first_block: int = 0,
        erased: bool = False,
    ) -> None:  # fmt: skip
        config = device.identity.config
        if not isinstance(config, AttendConfig) or not config.luns:
            raise CommandError(f"device must be an attend kernel with NAND, not {device.identity.name}")
        self._siblings = 2 if paired else 1
        if config.luns % self._siblings:
            raise CommandError(f"luns of a channel must be even for separate groups, not {config.luns}")
        luns = config.luns // self._siblings
        self.geometry = FlashGeometry(
            config.page_bytes, pages_per_block * self._siblings, config.channels, luns,
            blocks_per_lun * config.channels * luns,
        )  # fmt: skip
        self._device, self._first_row, self._rows = device, first_block * pages_per_block, pages_per_block
        self._order = ProgramOrder(self.geometry)
        self._erased = np.full(self.geometry.blocks, erased)

    def program(self, pages: PageNumbers, batch: PageWrites) -> None:
        """See Flash.program."""
        self._order.check(pages)
        self._erase([block for block in np.unique(pages // self.geometry.pages_per_block) if not self._erased[block]])
        nand.program(self._device, self._places(pages, batch.keys), list(seal_codewords(batch)))
        self._order.add(pages)

    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """See Flash.read."""
        if (erased := np.flatnonzero(self._order.are_erased(pages))).size:
            raise wrong_pages(pages, expected, dict.fromkeys(erased.tolist(), ERASED))
        places = self._places(pages, expected)
        try:
            sealed = nand.read(self._device, places, self.geometry.page_bytes)
        except nand.NandError as error:
            reasons = self._reasons(places, error)
            if not reasons:
                raise
            raise wrong_pages(pages, expected, reasons) from error
        stacked = np.array(sealed, np.uint8).reshape(len(pages), self.geometry.codewords, SEALED_BYTES)
        read, valid = unseal_pages(stacked, expected)
        check_pages(pages, expected, np.zeros(len(pages), bool), header_keys(read.aux)[0], valid)
        return read

    def erase(self, block: int) -> None:
        """See Flash.erase."""
        self._erase([block])
        self._order.erase(block)

    def entry(self, page: int) -> PageEntry:
        """See Flash.entry."""
        return PageEntry.unpack(int(self.entries(np.array([page]))[0]))

    def entries(self, pages: PageNumbers) -> NDArray[np.uint64]:
        """See Flash.entries."""
        geometry = self.geometry
        blocks, places = np.divmod(pages, geometry.pages_per_block)
        luns = blocks // geometry.channels % geometry.luns * self._siblings + places % self._siblings
        rows = self._first_row + blocks // geometry.lun_queues * self._rows + places // self._siblings
        channels, luns, rows = (x.astype(np.uint64) for x in (blocks % geometry.channels, luns, rows))
        words: NDArray[np.uint64] = channels * _CHANNEL + luns * _UNIT + rows
        return words

    def sync(self) -> None:
        """See Flash.sync: what a program has ended is durable."""

    def close(self) -> None:
        """See Flash.close: the device is its opener's to close."""

    def _places(self, pages: PageNumbers, keys: PageKeys) -> list[nand.NandPage]:
        return [
            nand.NandPage(
                PageEntry.unpack(word), PageTag(int(key["sequence"]), int(key["layer"]), int(key["head"])),
                int(key["index"]), PageKind(key["kind"]), bool(key["first"]),
            )
            for word, key in zip(self.entries(pages).tolist(), keys, strict=True)
        ]  # fmt: skip

    def _erase(self, blocks: Sequence[int]) -> None:
        """Erase blocks, of pairs both."""
        first = [block * self.geometry.pages_per_block for block in blocks]
        nand.erase(self._device, [self.entry(page + half) for page in first for half in range(self._siblings)])
        self._erased[list(blocks)] = True

    @staticmethod
    def _reasons(places: Sequence[nand.NandPage], error: nand.NandError) -> dict[int, str]:
        """Rows of pages that are damaged or another's; other faults are the device's."""
        faults = {(entry.channel, entry.lun, entry.row): fault for entry, fault in error.faults.items()}
        rows: dict[int, str] = {}
        for row, page in enumerate(places):
            fault = faults.get((page.entry.channel, page.entry.lun, page.entry.row), PageFault(0))
            for known, reason in _REASONS.items():
                if fault & known:
                    rows[row] = reason
        return rows
