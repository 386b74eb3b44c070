"""Flash in a file on the drive beside a device: pages come into a window of its memory when they are asked for.

    file on the drive ──direct I/O, P2P──► window: slots of a page ──► attend kernel

The file holds sealed codewords, as the kernel reads them, so nothing but direct I/O from the drive into the window
moves a page. Where the device has no P2P window the pages go through the buffer's host copy, and the link counts them.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import SEALED_BYTES, PageKind
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import CommandError, StateError
from nearflash.device.base import Device
from nearflash.storage.flash.base import Flash, ProgramOrder, check_pages
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.memory import memory_entries
from nearflash.storage.flash.page import PageData, PageKeys, PageWrites, header_keys, seal_codewords, unseal_pages
from nearflash.storage.io.backend import BLOCK_BYTES, IoBackend
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.support.threads import map_all

__all__ = ["WindowFlash", "slot_bytes"]

_READERS = 8
"""Direct reads in flight."""


def slot_bytes(page_bytes: int) -> int:
    """Bytes that a page takes in the file and in the window: sealed, in whole blocks of direct I/O.

    8 KiB for a page of 4 KiB, 20 KiB for one of 16 KiB.
    """
    sealed = FlashGeometry(page_bytes, 1, 1, 1, 1).codewords * SEALED_BYTES
    return -(-sealed // BLOCK_BYTES) * BLOCK_BYTES


class WindowFlash(Flash):
    """Pages in a new file at `path`, which has no name once it is open, and a window of `window_bytes` on `device`.

    A page's entry is its place in the window: `entries` brings in what is not there, in the place of what was not used
    for longest, pages of KV before those of the index; those of the call before stay, as a kernel may read them still.
    `entries` may be called by another thread while the device runs. Raises StateError for a file that is there,
    StorageFullError where the drive has no room, AddressError where the device's memory has none.
    """

    def __init__(
        self, device: Device, path: Path, geometry: FlashGeometry, window_bytes: int, *, direct: bool = True,
        backend: IoBackend | None = None,
    ) -> None:  # fmt: skip
        self.geometry, self.path, self._device = geometry, path, device
        self._slot_bytes = slot_bytes(geometry.page_bytes)
        self.slots = min(window_bytes // self._slot_bytes, geometry.pages)
        """Pages that the window has room for."""
        if self.slots < 2:
            raise CommandError(f"window_bytes must be at least {2 * self._slot_bytes}, two pages, not {window_bytes}")
        if path.exists():
            raise StateError(f"{path} must not be there yet: pages of a device lie in a new file; remove it")
        self._file = DirectFile.create(path, geometry.pages * self._slot_bytes, direct=direct, backend=backend)
        try:
            path.unlink()  # nothing is left of it after a kill
            self._buffer = device.allocate(self.slots * self._slot_bytes)
        except BaseException:
            self._file.close()
            raise
        memory = self._buffer.host if self._buffer.p2p is None else self._buffer.p2p
        self._window = memory.reshape(self.slots, self._slot_bytes)
        self._order = ProgramOrder(geometry)
        self._is_index = np.zeros(geometry.pages, bool)
        self._slot_of = np.full(geometry.pages, -1, np.int64)
        self._page_in = np.full(self.slots, -1, np.int64)
        self._used = np.zeros(self.slots, np.int64)
        self._turn = 1
        self._pool = ThreadPoolExecutor(_READERS, "window")
        self.loaded_bytes = 0
        """Read from the drive into the window so far."""
        self._open = True

    def program(self, pages: PageNumbers, batch: PageWrites) -> None:
        """See Flash.program."""
        self._order.check(pages)
        rows = self._rows(len(pages))
        rows[:, : self._sealed_bytes] = seal_codewords(batch).reshape(len(pages), self._sealed_bytes)
        for run in self.geometry.runs(pages):
            self._file.write(int(pages[run.start]) * self._slot_bytes, rows[run])
        self._is_index[pages] = batch.keys["kind"] == PageKind.INDEX
        self._order.add(pages)

    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """See Flash.read: by the host, past the device."""
        rows = self._rows(len(pages))
        self._file.read_many(pages * self._slot_bytes, rows)
        sealed = rows[:, : self._sealed_bytes].reshape(len(pages), self.geometry.codewords, SEALED_BYTES)
        read, valid = unseal_pages(sealed, expected)
        check_pages(pages, expected, self._order.are_erased(pages), header_keys(read.aux)[0], valid)
        return read

    def erase(self, block: int) -> None:
        """See Flash.erase."""
        pages = slice(block * self.geometry.pages_per_block, (block + 1) * self.geometry.pages_per_block)
        slots = self._slot_of[pages]
        self._page_in[slots[slots >= 0]] = -1
        self._slot_of[pages] = -1
        self._order.erase(block)

    def entry(self, page: int) -> PageEntry:
        """See Flash.entry."""
        return PageEntry.unpack(int(self.entries(np.array([page]))[0]))

    def entries(self, pages: PageNumbers) -> NDArray[np.uint64]:
        """See Flash.entries. Raises CommandError for more pages than the window has room for, StateError."""
        self._turn += 1
        wanted = np.unique(pages)
        slots = self._slot_of[wanted]
        self._used[slots[slots >= 0]] = self._turn
        lacking = wanted[slots < 0]
        if len(lacking):
            self._load(lacking, self._make_room(len(lacking)))
        channels = pages // self.geometry.pages_per_block % self.geometry.channels
        return memory_entries(self._buffer.address + self._slot_of[pages] * self._slot_bytes, channels)

    def sync(self) -> None:
        """See Flash.sync."""
        self._file.flush()

    def close(self) -> None:
        """See Flash.close."""
        if self._open:
            self._open = False
            self._pool.shutdown()
            self._file.close()
            self._device.free(self._buffer)

    @property
    def _sealed_bytes(self) -> int:
        return self.geometry.codewords * SEALED_BYTES

    def _rows(self, pages: int) -> NDArray[np.uint8]:
        return aligned_buffer(max(pages, 1) * self._slot_bytes).reshape(-1, self._slot_bytes)[:pages]

    def _make_room(self, count: int) -> NDArray[np.int64]:
        """Slots for so many pages, empty."""
        # A kernel may be reading what the call before brought in.
        able = np.flatnonzero((self._used < self._turn - 1) | (self._page_in < 0))
        if len(able) < count:
            raise CommandError(
                f"pages for one round must fit beside those of the round before in the window's {self.slots}, not "
                f"{count} in {len(able)}: give a larger window"
            )
        held = self._page_in[able]
        keys = self._used[able], (held >= 0) & self._is_index[held], held >= 0
        slots = able[np.lexsort(keys)[:count]]
        gone = self._page_in[slots]
        self._slot_of[gone[gone >= 0]] = -1
        self._page_in[slots] = -1
        return slots

    def _load(self, pages: PageNumbers, slots: NDArray[np.int64]) -> None:
        """Read pages into slots of the window."""

        def load(item: tuple[int, int]) -> None:
            page, slot = item
            self._file.read(page * self._slot_bytes, self._window[slot])

        map_all(self._pool, load, list(zip(pages.tolist(), slots.tolist(), strict=True)))
        if self._buffer.p2p is None:
            for slot in slots.tolist():
                self._buffer.sync_to_device(slot * self._slot_bytes, self._slot_bytes)
        self._slot_of[pages], self._page_in[slots], self._used[slots] = slots, pages, self._turn
        self.loaded_bytes += len(pages) * self._slot_bytes
