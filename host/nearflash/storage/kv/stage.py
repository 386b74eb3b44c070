"""Pages on their way to flash: readable here from when they are staged until they are programmed."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError
from nearflash.storage.flash.base import Flash
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.page import PAGE_KEY, PageWrites, page_array
from nearflash.support.write_behind import WriteBehind

__all__ = ["PageStage"]


class PageStage:
    """A ring of page buffers. Programs and erases reach the flash in the order in which they came.

    In the `background` a thread of its own does them; the first error is raised by every later call. Calls come from
    one thread. `ahead` is called before each program and erase, by the thread that does it: when it has returned,
    whatever accounts for the pages is durable.
    """

    def __init__(
        self, flash: Flash, buffer_bytes: int, *, background: bool, ahead: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        geometry = flash.geometry
        self._flash, self._size, self._ahead = flash, buffer_bytes // geometry.page_bytes, ahead
        if self._size < 2:
            raise CommandError(f"buffer_bytes must hold at least two pages, not {buffer_bytes!r} bytes")
        self._batch = PageWrites(
            np.zeros(self._size, PAGE_KEY), page_array(self._size, geometry.page_bytes),
            np.zeros((self._size, geometry.codewords, 8), np.uint8),
        )  # fmt: skip
        self._pages = np.zeros(self._size, np.int64)
        self._slots = np.full(geometry.pages, -1, np.int64)
        # Counts of pages since the start: staged, handed over, programmed. A page's slot is its count mod size.
        self._staged = self._handed = self._programmed = 0
        self._room = self._size // 2 if background else self._size
        """Pages that are staged before they are handed over: one half is programmed while the other is filled."""
        self._writes = WriteBehind(self._size if background else 0, "kv-writer")
        self._closed = False

    def check(self) -> None:
        """Raise the error of an earlier program or erase, if there was one."""
        self._writes.check()

    def put(self, pages: PageNumbers, batch: PageWrites) -> None:
        """Stage pages; waits, or programs, while there is no room."""
        done = 0
        while done < len(pages):
            self.check()
            first = self._staged % self._size
            count = min(len(pages) - done, self._size - first, self._size - (self._staged - self._programmed))
            slots, rows = slice(first, first + count), slice(done, done + count)
            self._batch.keys[slots], self._pages[slots] = batch.keys[rows], pages[rows]
            self._batch.data[slots], self._batch.aux[slots] = batch.data[rows], batch.aux[rows]
            self._slots[pages[rows]] = np.arange(first, first + count)
            self._staged, done = self._staged + count, done + count
            if self._staged - self._handed >= self._room:
                self.hand_over()
            while self._staged - self._programmed == self._size:
                self._writes.wait_for_oldest()

    def hand_over(self) -> None:
        """Begin to program what is staged; without a background do it."""
        start, end = self._handed, self._staged
        self._handed = end
        if start < end:
            self._writes.submit(self._program, start, end)

    def erase(self, block: int) -> None:
        """Erase a block after everything staged before, which is durable by then."""
        self.hand_over()
        self._writes.submit(self._erase, block)

    def flush(self) -> None:
        """Return when everything staged is programmed."""
        self.hand_over()
        self._writes.wait()

    def find(self, pages: PageNumbers) -> NDArray[np.int64]:
        """Slots of pages, -1 for those that are not here."""
        return self._slots[pages]

    def get(self, slots: NDArray[np.int64]) -> PageWrites:
        """The content of slots."""
        return PageWrites(self._batch.keys[slots], self._batch.data[slots], self._batch.aux[slots])

    def close(self) -> None:
        """Program what is staged, unless an earlier error was raised already. It may be called twice."""
        try:
            if not self._closed and not self._writes.was_raised:
                self.flush()
        finally:
            self._closed = True
            self._writes.close()

    def _erase(self, block: int) -> None:
        self._ahead()  # an older state may hold the pages in it
        self._flash.sync()  # the pages that were moved out of it, maybe under the promise of an earlier flush
        self._flash.erase(block)

    def _program(self, start: int, end: int) -> None:
        slots = np.arange(start, end) % self._size
        order = np.argsort(self._pages[slots], kind="stable")
        if (order[1:] > order[:-1]).all() and slots[0] <= slots[-1]:
            span = slice(slots[0], slots[-1] + 1)
            batch = PageWrites(self._batch.keys[span], self._batch.data[span], self._batch.aux[span])
        else:
            slots = slots[order]
            batch = self.get(slots)
        pages = self._pages[slots]
        self._ahead()
        self._flash.program(pages, batch)
        self._slots[pages[self._slots[pages] == slots]] = -1
        self._programmed = end
