"""The interface of every flash: pages programmed once, read and checked, erased by blocks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import PageError, StateError
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.page import PageData, PageKeys, PageWrites, describe
from nearflash.support.closing import Closing

__all__ = ["ERASED", "Flash", "ProgramOrder", "check_pages", "wrong_pages"]

Flags = NDArray[np.bool_]
ERASED = "is erased: nothing was written there"


class Flash(Closing, ABC):
    """Pages by number."""

    geometry: FlashGeometry
    concurrent: ClassVar[bool] = False
    """One thread may program and erase while others read other pages."""

    durable: ClassVar[bool] = False
    """Its pages outlast the program that made them."""

    @abstractmethod
    def program(self, pages: PageNumbers, batch: PageWrites) -> None:
        """Write pages: within a block in rising order, each once between two erases.

        Raises StateError for another order, StorageFullError or StateError where the medium fails.
        """

    @abstractmethod
    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """The pages (p,), in the order asked for, each checked against its expected key.

        Raises PageError that names the first page that is erased, damaged or another's; StateError for I/O errors.
        """

    @abstractmethod
    def erase(self, block: int) -> None:
        """Make all pages of a block erased."""

    @abstractmethod
    def entry(self, page: int) -> PageEntry:
        """The place where a device finds the page. Raises CommandError where it cannot reach it."""

    def entries(self, pages: PageNumbers) -> NDArray[np.uint64]:
        """Words of a device's page table, (p,). Raises CommandError where it cannot reach them."""
        return np.array([self.entry(int(page)).pack() for page in pages], np.uint64)

    def label(self, about: Mapping[str, Any]) -> None:
        """Note what the flash holds, as JSON values, where it outlasts its user. Raises StateError."""

    @abstractmethod
    def sync(self) -> None:
        """Return when everything written before is durable."""

    @abstractmethod
    def close(self) -> None:
        """Release the medium; it may be called twice."""


class ProgramOrder:
    """Which pages of each block are programmed: those below a number that only rises until the block is erased."""

    def __init__(self, geometry: FlashGeometry) -> None:
        self._pages_per_block = geometry.pages_per_block
        self._ends = np.zeros(geometry.blocks, np.int64)

    def check(self, pages: PageNumbers) -> None:
        """Raise StateError where a page is outside, or not behind all programmed and earlier ones of its block."""
        if len(pages) and not 0 <= pages.min() <= pages.max() < len(self._ends) * self._pages_per_block:
            raise StateError(f"pages must lie on the flash, not {int(pages.min())} to {int(pages.max())}")
        blocks, places = np.divmod(pages, self._pages_per_block)
        order = np.argsort(blocks, kind="stable")
        blocks, places = blocks[order], places[order]
        same = np.concatenate([[False], blocks[1:] == blocks[:-1]])[: len(blocks)]
        least = np.where(same, np.roll(places, 1) + 1, self._ends[blocks])
        if (wrong := np.flatnonzero(places < least)).size:
            page = pages[order][wrong[0]]
            raise StateError(f"pages must be programmed in rising order in an erased block, not page {page}; erase it")

    def add(self, pages: PageNumbers) -> None:
        """Count pages as programmed."""
        blocks, places = np.divmod(pages, self._pages_per_block)
        np.maximum.at(self._ends, blocks, places + 1)

    def are_erased(self, pages: PageNumbers) -> Flags:
        """Which pages lie above all that are programmed in their block."""
        blocks, places = np.divmod(pages, self._pages_per_block)
        erased: Flags = places >= self._ends[blocks]
        return erased

    def erase(self, block: int) -> None:
        """The block has no programmed pages any more."""
        self._ends[block] = 0


def check_pages(
    pages: PageNumbers, expected: PageKeys, erased: Flags, found: PageKeys, valid: Flags
) -> None:  # fmt: skip
    """Raise PageError for pages that are erased, whose header gives another key (`found`), or that are not valid."""
    misdirected = np.zeros(len(pages), bool)
    for name in ("sequence", "layer", "head", "index", "kind"):
        misdirected |= expected[name] != found[name]
    reasons = {}
    for row in np.flatnonzero(erased | misdirected | ~valid).tolist():
        if erased[row]:
            reasons[row] = ERASED
        elif misdirected[row]:
            reasons[row] = f"is another's: {describe(found[row])}"
        else:
            reasons[row] = "is damaged: its CRC32C is wrong"
    if reasons:
        raise wrong_pages(pages, expected, reasons)


def wrong_pages(pages: PageNumbers, expected: PageKeys, reasons: Mapping[int, str]) -> PageError:
    """The error of the pages at these rows."""
    first, *others = sorted(reasons)
    more = f" ({len(others)} more of these pages are wrong)" if others else ""
    return PageError(
        f"{describe(expected[first])} {reasons[first]}, at page {pages[first]} of the flash; append the sequence "
        f"again{more}",
        tuple((int(pages[row]), expected[row]) for row in (first, *others)),
    )
