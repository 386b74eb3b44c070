"""Pages of page_tags on a flash: given places, staged, read back, moved out of blocks that are erased."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.errors import CommandError, PageError
from nearflash.storage.flash.base import Flash
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.page import PageData, PageKeys, PageWrites, page_array
from nearflash.storage.kv.space import BlockSpace
from nearflash.storage.kv.stage import PageStage
from nearflash.storage.kv.statistics import Cause

__all__ = ["Moved", "PagePool"]

Queues = NDArray[np.int64]
Moved = Callable[[PageKeys, PageNumbers, PageNumbers], None]


class PagePool:
    """The pages of one user of a flash, which is used for nothing else.

    `moved(keys, old, new)` is called when pages have got other numbers. Where a page is not on the flash yet, it is
    read from the stage. `ahead` is PageStage's.
    """

    def __init__(
        self, flash: Flash, moved: Moved, *, buffer_bytes: int, background: bool, read_limit: int,
        ahead: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        if background and not flash.concurrent:
            raise CommandError(f"background must be False on {type(flash).__name__}, whose calls come from one thread")
        self.flash, self._moved, self._read_limit = flash, moved, read_limit
        self.space = BlockSpace(flash.geometry)
        self.stage = PageStage(flash, buffer_bytes, background=background, ahead=ahead)
        self.programmed = dict.fromkeys(Cause, 0)
        """Pages by cause."""
        self.reads = 0
        """Pages read from flash."""
        self._disturbed = False

    def put(self, kind: PageKind, batch: PageWrites, queues: Queues, cause: Cause) -> PageNumbers:
        """Give pages places in their LUN queues, and stage them; their numbers, in the order of the batch.

        There must be room (`make_room`). Raises what programming raised before.
        """
        pages = np.empty(len(queues), np.int64)
        for queue in np.unique(queues):
            of_queue = np.flatnonzero(queues == queue)
            pages[of_queue] = self.space.take(kind, int(queue), len(of_queue))
        self.space.own(pages, batch.keys)
        self.stage.put(pages, batch)
        self.programmed[cause] += len(pages)
        return pages

    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """Pages, from flash or from the stage, in the order asked for. Raises PageError."""
        slots = self.stage.find(pages)
        staged, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        self.count_reads(pages[missing])
        if not staged.size:
            return self.flash.read(pages, expected)
        data = self.stage.get(slots[staged])
        if (data.keys != expected[staged]).any():
            raise PageError("pages must be read before the next append, free or flush")
        read = self.flash.read(pages[missing], expected[missing])
        aux = np.empty((len(pages), *data.aux.shape[1:]), np.uint8)
        both = PageData(page_array(len(pages), self.flash.geometry.page_bytes), aux)
        for rows, part in ((staged, data), (missing, read)):
            both.data[rows], both.aux[rows] = part.data, part.aux
        return both

    def count_reads(self, pages: PageNumbers) -> None:
        """Count pages read, here or by a device: `reclaim` moves blocks that were read often."""
        blocks = pages // self.flash.geometry.pages_per_block
        np.add.at(self.space.reads, blocks, 1)
        self.reads += len(pages)
        self._disturbed |= bool((self.space.reads[blocks] > self._read_limit).any())

    def make_room(self, need: NDArray[np.int64]) -> None:
        """Move pages until `need` (kinds, queues) more have places. Raises StorageFullError before anything changed."""
        self.space.check(need)
        while (queue := self.space.lacking(need)) is not None:
            self._empty(self.space.victim(queue), Cause.COLLECTION)

    def reclaim(self) -> None:
        """Move what lies in blocks that were read more often than is good for it. Raises PageError."""
        self.stage.check()
        if self._disturbed:
            for block in self.space.find_disturbed(self._read_limit):
                self._empty(block, Cause.DISTURB)
            self._disturbed = False

    def flush(self) -> None:
        """Return when everything staged is on flash and durable."""
        self.stage.flush()
        self.flash.sync()

    def close(self) -> None:
        """Program what is staged and release the flash. Raises what programming raised, if nobody heard of it yet."""
        try:
            self.stage.close()
        finally:
            self.flash.close()

    def _empty(self, block: int, cause: Cause) -> None:
        """Move a block's live pages to other blocks of its LUN queue, and erase it."""
        old = self.space.pages_of(block)
        if old.size:
            keys = self.space.keys[old]
            read = self.read(old, keys)
            kind, queues = self.space.kind(block), np.full(len(old), block % self.flash.geometry.lun_queues)
            self.space.close(block)
            new = self.put(kind, PageWrites(keys, read.data, read.aux), queues, cause)
            self.space.replace(old, new)
            self._moved(keys, old, new)
        self.space.close(block)
        self.stage.erase(block)
        self.space.erase(block)
