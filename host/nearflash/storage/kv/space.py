"""Which pages of a flash hold what: blocks taken, filled, emptied and erased, each LUN queue on its own.

A block holds pages of one kind. Each LUN queue (the blocks of one LUN of a channel) has at most one open block of each
kind, into which pages go in order, and always keeps one free block, into which a block's live pages can be moved before
it is erased. So a LUN queue takes pages for as long as all of its live pages, kind by kind, fit all blocks but one.
"""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.errors import StorageFullError
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.page import PAGE_KEY, PageKeys

__all__ = ["BlockSpace"]

_NONE = -1
_KINDS = len(PageKind)


class BlockSpace:
    """Counts only: its user programs, moves and erases.

    `need` is always (kinds, LUN queues), in pages.
    """

    def __init__(self, geometry: FlashGeometry) -> None:
        self._geometry, self._size = geometry, geometry.pages_per_block
        self.keys: PageKeys = np.zeros(geometry.pages, PAGE_KEY)
        """Whose each live page is."""
        self._users = np.zeros(geometry.pages, np.int32)
        """Sequences that each page belongs to; none: it is dead."""
        self.erases = np.zeros(geometry.blocks, np.int64)
        self.reads = np.zeros(geometry.blocks, np.int64)
        """Page reads of each block since its erase."""
        self._taken = np.zeros(geometry.blocks, np.int64)
        self._kind = np.full(geometry.blocks, _NONE)
        self._live = np.zeros(geometry.blocks, np.int64)
        self._open = np.full((_KINDS, geometry.lun_queues), _NONE)
        # Sums over the blocks of each LUN queue.
        self._queue_live = np.zeros((_KINDS, geometry.lun_queues), np.int64)
        self._queue_free = np.full(geometry.lun_queues, geometry.blocks // geometry.lun_queues)

    # What there is

    @property
    def live_pages(self) -> int:
        """Pages in use."""
        return int(self._queue_live.sum())

    def check(self, need: NDArray[np.int64]) -> None:
        """Raise StorageFullError where `need` more pages cannot be had, whatever is moved."""
        geometry = self._geometry
        live = self._queue_live
        blocks = -(-(live + need) // self._size)
        most = geometry.blocks // geometry.lun_queues - 1
        if (full := np.flatnonzero((blocks.sum(axis=0) > most) & need.any(axis=0))).size:
            queue = int(full[0])
            raise StorageFullError(
                f"no room for {int(need.sum())} pages: lun {queue // geometry.channels} of channel "
                f"{queue % geometry.channels} has {most} blocks of {self._size} pages, of which {live[:, queue].sum()} "
                "are in use; free sequences, or make the flash larger"
            )

    def lacking(self, need: NDArray[np.int64]) -> int | None:
        """A LUN queue that has not blocks enough for `need`, the one kept free left out; None where all have."""
        open_, size = self._open, self._size
        free_pages = np.where(open_ == _NONE, 0, size - self._taken[open_])
        blocks = -(-np.maximum(need - free_pages, 0) // size)
        short = np.flatnonzero((blocks.sum(axis=0) > self._queue_free - 1) & need.any(axis=0))
        return int(short[0]) if short.size else None

    def victim(self, queue: int) -> int:
        """The block of a LUN queue with fewest live pages among those that hold dead ones; of equals the least worn."""
        blocks = np.arange(queue, self._geometry.blocks, self._geometry.lun_queues)
        blocks = blocks[self._taken[blocks] > self._live[blocks]]
        return int(blocks[np.lexsort((self.erases[blocks], self._live[blocks]))[0]])

    def find_disturbed(self, limit: int) -> list[int]:
        """Blocks in use that were read more than `limit` times since their erase."""
        return [int(block) for block in np.flatnonzero((self.reads > limit) & (self._kind != _NONE))]

    def pages_of(self, block: int) -> PageNumbers:
        """The live pages of a block, rising."""
        start = block * self._size
        return start + np.flatnonzero(self._users[start : start + self._size])

    # What changes

    def restore(self, ends: NDArray[np.int64], kinds: NDArray[np.int64], pages: PageNumbers, keys: PageKeys) -> None:
        """A flash that was in use: pages of each block up to its end are taken, `pages` are live, once for each time
        that they stand there; keys: of every page of the flash. Of a kind and LUN queue one block goes on being filled.
        """
        used = np.flatnonzero(ends)
        self._taken[used], self._kind[used], self.keys[:] = ends[used], kinds[used], keys
        np.subtract.at(self._queue_free, used % self._geometry.lun_queues, 1)
        np.add.at(self._users, pages, 1)
        self._count(np.unique(pages), 1)
        for block in used[self._taken[used] < self._size].tolist():
            kind_and_queue = self._kind[block], block % self._geometry.lun_queues
            self._taken[block] += self._taken[block] % 2  # pages of separate groups are pairs
            if self._open[kind_and_queue] == _NONE and self._taken[block] < self._size:
                self._open[kind_and_queue] = block
            else:
                self._taken[block] = self._size  # what was not taken is dead

    def take(self, kind: PageKind, queue: int, count: int) -> PageNumbers:
        """The next `count` pages of a LUN queue; live only after `own`. There must be room (`lacking`)."""
        parts = []
        while count:
            block = self._open[kind, queue]
            if block == _NONE:
                block = self._open[kind, queue] = self._least_worn(queue)
                self._kind[block] = kind
                self._queue_free[queue] -= 1
            part = min(count, self._size - int(self._taken[block]))
            parts.append(block * self._size + self._taken[block] + np.arange(part))
            self._taken[block] += part
            if self._taken[block] == self._size:
                self._open[kind, queue] = _NONE
            count -= part
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def own(self, pages: PageNumbers, keys: PageKeys) -> None:
        """Pages taken are now live, of one sequence, and these are their keys."""
        self._users[pages], self.keys[pages] = 1, keys
        self._count(pages, 1)

    def share(self, pages: PageNumbers) -> None:
        """Live pages are now of one sequence more."""
        self._users[pages] += 1

    def release(self, pages: PageNumbers) -> None:
        """A sequence no longer needs its pages; those that no other has are dead."""
        self._users[pages] -= 1
        self._count(pages[self._users[pages] == 0], -1)

    def replace(self, old: PageNumbers, new: PageNumbers) -> None:
        """Live pages have been moved to `new`, which are of as many sequences; the old ones are dead."""
        self._users[new] = self._users[old]
        self._users[old] = 0
        self._count(old, -1)

    def close(self, block: int) -> None:
        """Take no further pages of a block."""
        self._open[self._open == block] = _NONE

    def erase(self, block: int) -> None:
        """A closed block without live pages is free again."""
        self._taken[block] = self.reads[block] = 0
        self._kind[block] = _NONE
        self._queue_free[block % self._geometry.lun_queues] += 1
        self.erases[block] += 1

    def kind(self, block: int) -> PageKind:
        """The kind of pages in a block in use."""
        return PageKind(int(self._kind[block]))

    def _count(self, pages: PageNumbers, change: int) -> None:
        blocks = pages // self._size
        np.add.at(self._live, blocks, change)
        np.add.at(self._queue_live, (self._kind[blocks], blocks % self._geometry.lun_queues), change)

    def _least_worn(self, queue: int) -> int:
        blocks = np.arange(queue, self._geometry.blocks, self._geometry.lun_queues)
        blocks = blocks[self._kind[blocks] == _NONE]
        return int(blocks[np.argmin(self.erases[blocks])])
