"""Flash on a device's own NAND, through its page operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import SEALED_BYTES, PageKind, PageTag
from nearflash.abi.attention.page_operation import PageFault
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import CommandError, ReadOnlyError
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.base import Device
from nearflash.device.drivers import pages as nand
from nearflash.storage.flash.bad_blocks import TABLE_BLOCKS, BadBlockTable
from nearflash.storage.flash.base import ERASED, Flash, ProgramOrder, check_pages, wrong_pages
from nearflash.storage.flash.block_map import BlockMap
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.page import (
    PAGE_KEY,
    PageData,
    PageKeys,
    PageWrites,
    header_keys,
    seal_codewords,
    unseal_pages,
)

__all__ = ["NandFlash", "NandWear", "spare_blocks_for"]

_REASONS = {
    PageFault.UNCORRECTABLE: "is damaged: it has more bit errors than can be corrected",
    PageFault.MISDIRECTED: "is another's",
}
_CHANNEL, _UNIT = (np.uint64(entry.pack()) for entry in (PageEntry(1), PageEntry(0, 1)))
"""A page entry's word is the sum of these, times channel and lun, and the row."""


@dataclass(frozen=True)
class NandWear:
    """Bad blocks of a flash, and what they cost."""

    bad_blocks: int
    """Of a LUN, of pairs both: marked by the factory, or failed since."""
    retired: int
    """Of them since the flash was opened."""
    spare_blocks: int
    """Left on the LUN that has fewest."""
    moved_pages: int
    """Programmed again since a block failed."""
    table_versions: int
    """Of the table of bad blocks, written."""


def spare_blocks_for(blocks_per_lun: int) -> int:
    """Spares for the blocks that a part may lose in its life: two of a hundred, as data sheets have it; at least 2."""
    return max(-(-blocks_per_lun // 50), 2)


class NandFlash(Flash):
    """Blocks of all luns of `device`, from NAND block `first_block` on.

    `paired` is for separate KV page groups: a block is two of sibling luns (lun XOR 1), its pages alternately on one
    and the other, so that V lies at K's row. A block is erased before its first use, unless all are erased already
    (`erased`). A device's calls come from one thread, and so must a NandFlash's. Raises CommandError for a device
    without NAND.

    With `spare_blocks` on each LUN blocks that fail are replaced: those that the factory marked (ONFI) and those of the
    NAND's table (BadBlockTable) are not used; where a program or erase fails, the block's pages are programmed again to
    a spare, and the block is never used again. A page is where it was until the whole block is copied. A LUN without
    a spare left makes the flash read only: ReadOnlyError, then and for every later program and erase; all pages that
    were programmed are still read.
    """

    def __init__(
        self, device: Device, *, pages_per_block: int, blocks_per_lun: int, paired: bool, first_block: int = 0,
        erased: bool = False, spare_blocks: int = 0,
    ) -> None:  # fmt: skip
        config = device.identity.config
        if not isinstance(config, AttendConfig) or not config.luns:
            raise CommandError(f"device must be an attend kernel with NAND, not {device.identity.name}")
        if spare_blocks < 0:
            raise CommandError(f"spare_blocks must be at least 0, not {spare_blocks!r}")
        self._siblings = 2 if paired else 1
        if config.luns % self._siblings:
            raise CommandError(f"luns of a channel must be even for separate groups, not {config.luns}")
        luns = config.luns // self._siblings
        self.geometry = FlashGeometry(
            config.page_bytes, pages_per_block * self._siblings, config.channels, luns,
            blocks_per_lun * config.channels * luns,
        )  # fmt: skip
        self._device, self._rows, rows = device, pages_per_block, blocks_per_lun + spare_blocks
        self._table, bad = None, np.zeros((rows, config.channels, config.luns), bool)
        if spare_blocks:
            self._table = BadBlockTable(device, config, first_block, pages_per_block, rows)
            bad, first_block = self._table.bad, first_block + TABLE_BLOCKS
        self._first_row = first_block * pages_per_block
        of_pair = np.logical_or.reduce(bad.reshape(rows, config.channels, luns, self._siblings), axis=3)
        self._map = BlockMap(self.geometry, np.swapaxes(of_pair, 1, 2).reshape(rows, self.geometry.lun_queues))
        self._found_bad, self._moved_pages = self._map.bad_blocks, 0
        self._order = ProgramOrder(self.geometry)
        self._keys: PageKeys = np.zeros(self.geometry.pages, PAGE_KEY)
        self._programmed = np.zeros(self.geometry.pages, bool)
        self._erased = np.full(self.geometry.blocks, erased)
        self._read_only: ReadOnlyError | None = None

    @property
    def wear(self) -> NandWear:
        """Bad blocks so far."""
        bad, table = self._map.bad_blocks, self._table
        return NandWear(
            bad, bad - self._found_bad, self._map.least_spares, self._moved_pages, table.saved if table else 0
        )

    def program(self, pages: PageNumbers, batch: PageWrites) -> None:
        """See Flash.program."""
        self._order.check(pages)
        blocks, places = np.divmod(pages, self.geometry.pages_per_block)
        self._erase([block for block in np.unique(blocks).tolist() if not self._erased[block]])
        sealed = seal_codewords(batch)
        failed = self._try_program(self._words(self._map.places[blocks], places), batch.keys, sealed)
        for block in np.unique(blocks[failed]).tolist():
            own = blocks == block
            self._move(block, _Content(places[own], batch.keys[own], sealed[own]))
        self._order.add(pages)
        self._keys[pages], self._programmed[pages] = batch.keys, True

    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """See Flash.read."""
        if (erased := np.flatnonzero(self._order.are_erased(pages))).size:
            raise wrong_pages(pages, expected, dict.fromkeys(erased.tolist(), ERASED))
        places = self._pages(self.entries(pages), expected)
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
        self._programmed.reshape(self.geometry.blocks, -1)[block] = False

    def entry(self, page: int) -> PageEntry:
        """See Flash.entry."""
        return PageEntry.unpack(int(self.entries(np.array([page]))[0]))

    def entries(self, pages: PageNumbers) -> NDArray[np.uint64]:
        """See Flash.entries; they hold until the next program or erase, which may move a block."""
        blocks, places = np.divmod(pages, self.geometry.pages_per_block)
        return self._words(self._map.places[blocks], places)

    def sync(self) -> None:
        """See Flash.sync: what a program has ended is durable."""

    def close(self) -> None:
        """See Flash.close: the device is its opener's to close."""

    def _words(self, at: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Page entries of pages `places` of the blocks that lie `at` places of the map."""
        geometry = self.geometry
        luns = at // geometry.channels % geometry.luns * self._siblings + places % self._siblings
        rows = self._first_row + at // geometry.lun_queues * self._rows + places // self._siblings
        channels = at % geometry.channels
        parts = (x.astype(np.uint64) * unit for x, unit in ((channels, _CHANNEL), (luns, _UNIT), (rows, np.uint64(1))))
        words: NDArray[np.uint64] = sum(parts, np.zeros(1, np.uint64))
        return words

    @staticmethod
    def _pages(words: NDArray[np.uint64], keys: PageKeys) -> list[nand.NandPage]:
        return [
            nand.NandPage(
                PageEntry.unpack(word), PageTag(int(key["sequence"]), int(key["layer"]), int(key["head"])),
                int(key["index"]), PageKind(key["kind"]), bool(key["first"]),
            )
            for word, key in zip(words.tolist(), keys, strict=True)
        ]  # fmt: skip

    # Blocks that fail

    def _erase(self, blocks: Sequence[int]) -> None:
        """Erase blocks, of pairs both, and replace those that fail."""
        for block, failed in zip(blocks, self._try_erase(self._map.places[list(blocks)]), strict=True):
            if failed:
                self._move(block, _Content.none(self.geometry.codewords))
        self._erased[list(blocks)] = True

    def _move(self, block: int, new: "_Content") -> None:
        """Put what was programmed to a block, and what is new, on a spare in its place. Raises ReadOnlyError."""
        kept = self._read_kept(block) if len(new.places) else new
        both = new if kept is new else kept.then(new)
        queue = block % self.geometry.lun_queues
        while True:
            at = np.array([self._take_spare(queue)])
            words = self._words(at, both.places)
            if not self._try_erase(at)[0] and not self._try_program(words, both.keys, both.sealed).any():
                break
            self._retire(int(at[0]))
        self._moved_pages += len(both.places)
        self._retire(self._map.replace(block, int(at[0])))

    def _read_kept(self, block: int) -> "_Content":
        """Pages of a block that were programmed by calls before and can be read; the others are lost already."""
        start = block * self.geometry.pages_per_block
        pages = start + np.flatnonzero(self._programmed[start : start + self.geometry.pages_per_block])
        read, faults = nand.try_read(self._device, self._pages(self.entries(pages), self._keys[pages]))
        whole = np.array([not fault for fault in faults], bool)
        sealed = np.array(read, np.uint8).reshape(len(pages), self.geometry.codewords, SEALED_BYTES)
        return _Content((pages - start)[whole], self._keys[pages[whole]], sealed[whole])

    def _take_spare(self, queue: int) -> int:
        try:
            return self._map.take(queue)
        except ReadOnlyError as error:
            self._read_only = error
            raise

    def _retire(self, place: int) -> None:
        geometry = self.geometry
        self._map.retire(place)
        lun = place // geometry.channels % geometry.luns * self._siblings
        row, channel = place // geometry.lun_queues, place % geometry.channels
        if self._table is None:
            return
        try:
            self._table.retire([(row, channel, lun + half) for half in range(self._siblings)])
        except ReadOnlyError as error:
            self._read_only = error
            raise

    def _try_program(self, words: NDArray[np.uint64], keys: PageKeys, sealed: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Program pages; which of them failed."""
        self._check_writable()
        pages = self._pages(words, keys)
        return _find_failed(pages, lambda: nand.program(self._device, pages, list(sealed)))

    def _try_erase(self, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Erase blocks at places of the map, of pairs both; which of them failed."""
        self._check_writable()
        halves = np.arange(self._siblings)
        words = self._words(np.repeat(at, self._siblings), np.tile(halves, len(at)))
        entries = [PageEntry.unpack(word) for word in words.tolist()]
        halves_failed = _find_failed(entries, lambda: nand.erase(self._device, entries))
        failed: NDArray[np.bool_] = np.logical_or.reduce(halves_failed.reshape(len(at), self._siblings), axis=1)
        return failed

    def _check_writable(self) -> None:
        if self._read_only is not None:
            raise self._read_only

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


@dataclass(frozen=True)
class _Content:
    """Pages of a block: their places in it, keys, and codewords (p, codewords, 528)."""

    places: NDArray[np.int64]
    keys: PageKeys
    sealed: NDArray[np.uint8]

    @classmethod
    def none(cls, codewords: int) -> "_Content":
        return cls(np.zeros(0, np.int64), np.zeros(0, PAGE_KEY), np.zeros((0, codewords, SEALED_BYTES), np.uint8))

    def then(self, other: "_Content") -> "_Content":
        return _Content(
            np.concatenate([self.places, other.places]), np.concatenate([self.keys, other.keys]),
            np.concatenate([self.sealed, other.sealed]),
        )  # fmt: skip


def _find_failed(items: Sequence[nand.NandPage] | Sequence[PageEntry], act: Callable[[], None]) -> NDArray[np.bool_]:
    """Act on pages or blocks; for which of them a LUN reported FAIL. Raises NandError for other faults."""
    try:
        act()
    except nand.NandError as error:
        if any(fault != PageFault.FAILED for fault in error.faults.values()):
            raise
        failed = {(one.channel, one.lun, one.row) for one in error.faults}
        entries = (item.entry if isinstance(item, nand.NandPage) else item for item in items)
        return np.array([(one.channel, one.lun, one.row) in failed for one in entries])
    return np.zeros(len(items), bool)
