"""Flash in a file or on a block device, by direct I/O.

    superblock | block 0: data pages, spare zone | block 1: … | …

The superblock is sealed JSON: geometry, and the label of the file's user. Data is written before its spare
records, and an erase writes a spare zone of zeros: a page counts only where its record is there and its CRC32C is
right: that of key, aux and data, XOR the file's own salt, so that pages of another file do not count. Records are kept
in memory too, so that a read of a page is one aligned read of its data.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import CommandError, PageError, StateError
from nearflash.storage.flash.base import Flash, ProgramOrder, check_pages
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.page import (
    PageData,
    PageKeys,
    PageWrites,
    header_keys,
    page_array,
    page_checksums,
    page_space,
)
from nearflash.storage.flash.spare import SpareRecords
from nearflash.storage.io.backend import BLOCK_BYTES, IoBackend
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.io.sealed import is_erased, read_superblock, seal
from nearflash.support.tables import check_fields
from nearflash.support.threads import map_all

__all__ = ["FLASH_VERSION", "KEPT", "FileFlash", "is_unwritten"]

FLASH_VERSION = 1
"""Raised whenever the file's layout changes meaning; other versions are rejected."""
KEPT = "store"
"""In a label: the name of what the flash keeps beyond its user's life. It is never emptied for another one."""
SECTOR_BYTES = 512
"""That a drive writes at once, whatever happens."""
_KIND = "flash"
_LOOK_BYTES = 128 << 10
"""What is looked at before a file is written over: file systems and partition tables begin within it."""
_T = TypeVar("_T")
_Pages = TypeVar("_Pages", int, PageNumbers)
DEFAULT_THREADS = 16
_QUEUED_RUN = 4
"""Pages next to each other, on average, from which on a call for each run is quicker than a queue of pages."""


class FileFlash(Flash):
    """An open, locked file. Use `create` or `open`, then `close`.

    `threads` transfers are in flight at once; a device completes few of them no faster than one.
    """

    concurrent = True
    durable = True
    about: Mapping[str, Any]
    """What the flash holds (`label`): JSON values; empty before."""

    def __init__(
        self, file: DirectFile, geometry: FlashGeometry, about: Mapping[str, Any], threads: int, salt: int
    ) -> None:
        """Not for callers: see `create` and `open`."""
        self._salt = np.uint32(salt)
        self.geometry, self.about, self._file, self._threads = geometry, about, file, threads
        self._spare = SpareRecords(geometry)
        self._order = ProgramOrder(geometry)
        self._flush_error: StateError | None = None
        self._pool = ThreadPoolExecutor(threads, "flash")

    # Life

    @classmethod
    def create(
        cls, path: Path, geometry: FlashGeometry, *, threads: int = DEFAULT_THREADS, direct: bool = True,
        backend: IoBackend | None = None,
    ) -> Self:  # fmt: skip
        """An erased flash. An existing flash is emptied, unless its label names what it keeps (`KEPT`); other files,
        and devices that are not empty, are rejected.

        Raises StorageFullError where the disk has no room, StateError otherwise.
        """
        if threads < 1:
            raise CommandError(f"threads must be at least 1, not {threads!r}")
        zone_bytes = SpareRecords(geometry).zone_bytes
        size_bytes = BLOCK_BYTES + geometry.blocks * (geometry.block_bytes + zone_bytes)
        file = DirectFile.create(path, size_bytes, direct=direct, backend=backend, check=_check_replaceable)
        try:
            flash = cls(file, geometry, {}, threads, secrets.randbits(32))
            if path.is_block_device():
                flash._all(flash.erase, range(geometry.blocks))
            flash.label({})
            return flash
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(
        cls, path: Path, *, threads: int = DEFAULT_THREADS, direct: bool = True, backend: IoBackend | None = None,
        writable: bool = True,
    ) -> Self:  # fmt: skip
        """An existing flash as it was left; else than `writable`, only to be read. Raises StateError, naming what is
        wrong; changes nothing.
        """
        file = DirectFile.open(path, direct=direct, backend=backend, writable=writable)
        try:
            body = _superblock(file)
            flash = cls(file, _geometry(file, body["geometry"]), body["about"], threads, body["salt"])
            if file.size_bytes < flash.offset(flash.geometry.pages):
                raise StateError(f"{path} must have {flash.offset(flash.geometry.pages)} bytes, not {file.size_bytes}")
            flash._load()
        except BaseException:
            file.close()
            raise
        return flash

    @property
    def path(self) -> Path:
        """The file's path."""
        return self._file.path

    def label(self, about: Mapping[str, Any]) -> None:
        """See Flash.label."""
        body = {"version": FLASH_VERSION, "geometry": asdict(self.geometry), "about": about, "salt": int(self._salt)}
        block = seal(_KIND, body, BLOCK_BYTES)
        if KEPT in about and block[SECTOR_BYTES:].any():
            # A power cut leaves the old label or the new one only where a drive writes it at once.
            raise StateError(f"the label of a kept flash must fit {SECTOR_BYTES} bytes, not {dict(about)!r:.80}")
        self._file.write(0, block)
        self.about = about

    def sync(self) -> None:
        """See Flash.sync. After an error every later call raises it: nothing is known about what was written."""
        if self._flush_error is not None:
            raise self._flush_error
        try:
            self._file.flush()
        except StateError as error:
            self._flush_error = error
            raise

    def close(self) -> None:
        """See Flash.close."""
        self._pool.shutdown()
        self._file.close()

    # Use

    def program(self, pages: PageNumbers, batch: PageWrites) -> None:
        """See Flash.program."""
        self._order.check(pages)
        checksums = self._checksums(batch.keys, batch.aux, batch.data)
        runs = self.geometry.runs(pages)
        self._all(lambda run: self._file.write(self.offset(int(pages[run.start])), _align(batch.data[run])), runs)
        self._order.add(pages)
        self._spare.put(pages, batch.aux, checksums)
        self._all(lambda run: self._write_spare(pages[run]), runs)

    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """See Flash.read."""
        read, checksums, actual = self._read(pages, expected)
        if ((actual == checksums) & (checksums != 0)).all():
            return read  # they were written as pages of these keys
        keys, has_header = header_keys(read.aux)
        check_pages(pages, expected, ~has_header & (checksums == 0), keys, actual == checksums)
        return read

    def valid(self, pages: PageNumbers, keys: PageKeys) -> NDArray[np.bool_]:
        """Which pages are valid pages of these keys, their data read for it."""
        _, checksums, actual = self._read(pages, keys)
        valid: NDArray[np.bool_] = actual == checksums
        return valid

    def headers(self, pages: PageNumbers) -> tuple[PageKeys, NDArray[np.bool_], NDArray[np.bool_]]:
        """Keys of pages as their records give them (`first` 0), which have a header, which are erased."""
        keys, has_header = header_keys(self._spare.get(pages)[0])
        return keys, has_header, self._spare.are_erased(pages)

    def _read(self, pages: PageNumbers, keys: PageKeys) -> tuple[PageData, NDArray[np.uint32], NDArray[np.uint32]]:
        """Pages, the CRC32C recorded of each, and that of what was read as a page of `keys`."""
        if len(pages) and not 0 <= pages.min() <= pages.max() < self.geometry.pages:
            raise PageError(
                f"pages must be 0 to {self.geometry.pages - 1}, not {int(pages.min())} to {int(pages.max())}"
            )
        data, size = page_space(len(pages), self.geometry.page_bytes), self.geometry.page_bytes
        aux, checksums = self._spare.get(pages)
        order = np.argsort(pages, kind="stable")
        rising = pages[order]
        if self._file.backend.queued and len(pages) < _QUEUED_RUN * self.geometry.count_runs(rising):
            self._file.read_many(self.offset(pages), data)
            return PageData(data, aux), checksums, self._checksums(keys, aux, data)
        runs = self.geometry.runs(rising)
        actual, memory = np.empty(len(pages), np.uint32), data.reshape(-1).data
        rows = order.tolist()
        offsets = self.offset(rising).tolist()

        def load(runs: Sequence[slice]) -> None:
            for run in runs:
                together = rows[run] == list(range(rows[run.start], rows[run.start] + run.stop - run.start))
                spans = [(rows[run.start], rows[run.stop - 1] + 1)] if together else [(r, r + 1) for r in rows[run]]
                self._file.scatter(offsets[run.start], [memory[start * size : end * size] for start, end in spans])
            taken = np.concatenate([order[run] for run in runs])
            actual[taken] = self._checksums(keys, aux, data, taken)

        self._all(load, [runs[first :: self._threads] for first in range(min(self._threads, len(runs)))])
        return PageData(data, aux), checksums, actual

    def _checksums(
        self, keys: PageKeys, aux: NDArray[np.uint8], data: NDArray[np.uint8], chosen: PageNumbers | None = None
    ) -> NDArray[np.uint32]:
        """Checksums, of this file alone, of pages, (p,); or of the `chosen` rows (n,)."""
        return page_checksums(keys, aux, data, chosen) ^ self._salt

    def erase(self, block: int) -> None:
        """See Flash.erase."""
        self._spare.zone(block)[:] = 0
        self._file.write(self.offset((block + 1) * self.geometry.pages_per_block) - self._spare.zone_bytes,
                         self._spare.zone(block))  # fmt: skip
        self._order.erase(block)

    def entry(self, page: int) -> PageEntry:
        """See Flash.entry: no device reaches a file."""
        raise CommandError(f"pages of a device must lie in its memory or on its flash, not in {self.path}")

    # Parts

    def offset(self, page: _Pages) -> _Pages:
        """The offset of a page, or of each; the first page of no block: the end of the file."""
        block, page_in_block = page // self.geometry.pages_per_block, page % self.geometry.pages_per_block
        block_bytes = self.geometry.block_bytes + self._spare.zone_bytes
        return BLOCK_BYTES + block * block_bytes + page_in_block * self.geometry.page_bytes

    def _write_spare(self, pages: PageNumbers) -> None:
        block, span = int(pages[0]) // self.geometry.pages_per_block, self._spare.span(pages)
        start = self.offset((block + 1) * self.geometry.pages_per_block) - self._spare.zone_bytes
        self._file.write(start + span.start, self._spare.zone(block)[span])

    def _load(self) -> None:
        def load(block: int) -> None:
            start = self.offset((block + 1) * self.geometry.pages_per_block) - self._spare.zone_bytes
            self._file.read(start, self._spare.zone(block))

        self._all(load, range(self.geometry.blocks))
        pages = np.arange(self.geometry.pages)
        self._order.add(pages[~self._spare.are_erased(pages)])

    def _all(self, call: Callable[[_T], None], items: Iterable[_T]) -> None:
        """Call for each item, on as many threads as there are. Raises an error when all of them have ended."""
        todo = list(items)
        if len(todo) == 1:
            call(todo[0])
            return

        def work(first: int) -> None:
            for item in todo[first :: self._threads]:
                call(item)

        map_all(self._pool, work, range(min(self._threads, len(todo))))


def _align(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The pages as contiguous bytes fit for direct I/O, copied where they are not."""
    if data.flags.c_contiguous and data.ctypes.data % BLOCK_BYTES == 0:
        return data
    copy = page_array(*data.shape)
    copy[:] = data
    return copy


def _superblock(file: DirectFile) -> dict[str, Any]:
    body = {"salt": 0} | read_superblock(file, _KIND, FLASH_VERSION, "a flash")  # files of before have no salt
    check_fields(f"the superblock of {file.path}", body, version=int, geometry=dict, about=dict, salt=int)
    if body["salt"] >> 32:
        raise StateError(f"the salt of {file.path} must have 32 bits, not {body['salt']}")
    return body


def _geometry(file: DirectFile, body: dict[str, Any]) -> FlashGeometry:
    """Raises StateError for what cannot be, or does not fit the file."""
    what = f"the geometry of {file.path}"
    geometry = check_fields(what, body, page_bytes=int, pages_per_block=int, channels=int, luns=int, blocks=int)
    try:
        stored = FlashGeometry(*geometry)
    except CommandError as error:
        raise StateError(f"{what} must describe a flash: {error}") from error
    if stored.blocks * stored.block_bytes > file.size_bytes:
        raise StateError(f"{what} must fit its {file.size_bytes} bytes, not {stored.blocks} times {stored.block_bytes}")
    return stored


def is_unwritten(path: Path, *, direct: bool = True, backend: IoBackend | None = None) -> bool:
    """Nothing was ever written: there is no file, or one of zeros alone, as a crash while it was made leaves it.

    Raises StateError for a file in use.
    """
    if not path.exists():
        return True
    with DirectFile.open(path, direct=direct, backend=backend) as file:
        return _has_zeros(file, file.size_bytes)


def _has_zeros(file: DirectFile, size_bytes: int) -> bool:
    """Whether a file's first bytes are zeros, and whole blocks."""
    memory, whole = aligned_buffer(_LOOK_BYTES), size_bytes // BLOCK_BYTES * BLOCK_BYTES
    for start in range(0, whole, _LOOK_BYTES):
        part = memory[: min(whole - start, _LOOK_BYTES)]
        file.read(start, part)
        if not is_erased(part):
            return False
    return size_bytes == whole


def _check_replaceable(file: DirectFile) -> None:
    """Raise StateError unless the file is a flash that keeps nothing, or erased: a device where superblocks and
    partition tables are, a file all over."""
    looked = min(file.size_bytes, _LOOK_BYTES) if file.path.is_block_device() else file.size_bytes
    if not _has_zeros(file, looked) and KEPT in _superblock(file)["about"]:
        raise StateError(
            f"{file.path} must be a file that keeps no sequences, but it holds those of a session: open it as one "
            "(generate --session, open_kept_store), or give another path"
        )
