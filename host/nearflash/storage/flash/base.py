"""The interface of every flash: pages programmed once, read and checked, erased by blocks."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.pages import PageEntry
from nearflash.abi.errors import PageError, StateError
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.page import PageBatch, PageData, PageKeys, describe

__all__ = ["Flash", "ProgramOrder", "check_pages"]


class Flash(ABC):
    """Pages by number."""

    geometry: FlashGeometry
    concurrent: ClassVar[bool] = False
    """One thread may program and erase while others read other pages."""

    @abstractmethod
    def program(self, pages: PageNumbers, batch: PageBatch) -> None:
        """Write pages: within a block in rising order, each once between two erases.

        Raises StateError for another order, StorageFullError or StateError where the medium fails.
        """

    @abstractmethod
    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """The pages (p,), in the order asked for, each checked against its expected key.

        Raises PageError that names the first page that is blank, damaged or another's; StateError for I/O errors.
        """

    @abstractmethod
    def erase(self, block: int) -> None:
        """Make all pages of a block blank."""

    @abstractmethod
    def entry(self, page: int) -> PageEntry:
        """Where a device finds the page. Raises CommandError where it cannot reach it."""

    def entries(self, pages: PageNumbers) -> NDArray[np.uint64]:
        """Words of a device's page table, (p,). Raises CommandError where it cannot reach them."""
        return np.array([self.entry(int(page)).pack() for page in pages], np.uint64)

    @abstractmethod
    def sync(self) -> None:
        """Return when everything written before is durable."""

    @abstractmethod
    def close(self) -> None:
        """Release the medium; it may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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

    def erase(self, block: int) -> None:
        """Begin the block anew."""
        self._ends[block] = 0


def check_pages(pages: PageNumbers, expected: PageKeys, blank: NDArray[np.bool_], found: PageKeys,
                whole: NDArray[np.bool_]) -> None:  # fmt: skip
    """Raise PageError for the first page that is blank, whose header gives another key (`found`), or is not whole."""
    names = ("sequence", "layer", "head", "index", "kind")
    foreign = np.zeros(len(pages), bool)
    for name in names:
        foreign |= expected[name] != found[name]
    wrong = np.flatnonzero(blank | foreign | ~whole)
    if not wrong.size:
        return
    at = int(wrong[0])
    if blank[at]:
        reason = "is blank: it was never written, or erased"
    elif foreign[at]:
        reason = f"is another's: {describe(found[at])}"
    else:
        reason = "is damaged: its CRC32C is wrong"
    more = f" ({wrong.size - 1} more of these pages are wrong)" if wrong.size > 1 else ""
    raise PageError(
        f"{describe(expected[at])} {reason}, at page {pages[at]} of the flash; append the sequence anew{more}",
        tuple((int(pages[i]), expected[i]) for i in wrong),
    )
