"""One file of blocks: opened, rebuilt from its records, and read; a `SegmentLog` writes it."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.blocks.index import BlockIndex
from nearflash.storage.blocks.layout import BlockLabel, BlockLayout, read_label
from nearflash.storage.blocks.record import Records, Zone, copy_good_blocks
from nearflash.storage.blocks.segment_log import Put, SegmentLog
from nearflash.storage.blocks.statistics import BlockStatistics
from nearflash.storage.blocks.transfer import BlockTransfer
from nearflash.storage.io.backend import IoBackend
from nearflash.storage.io.direct import DirectFile, partial_of
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.support.closing import Closing
from nearflash.support.files import give_name
from nearflash.support.threads import CallingThread, map_all

__all__ = ["RUN_BYTES", "BlockFile", "Get", "create_file"]

Bytes = NDArray[np.uint8]
Get = tuple[int, bytes, Bytes]
"""A block to read: which one of its transfer it is, its key, and the memory that it fills."""
RUN_BYTES = 8 << 20
"""Most of one read."""
_THREADS = 8
"""Reads in flight, and as many writes."""
_log = logging.getLogger(__name__)


class BlockFile(Closing):
    """An open, locked file. Use `open`, then `close`. Any thread may read; one at a time writes."""

    def __init__(self, file: DirectFile, superblock: BlockLabel, threads: int) -> None:
        """Not for callers: see `open`."""
        self.label, self.layout, self._file = superblock, superblock.layout, file
        self.index, self.counts, self.lock = BlockIndex(self.layout), BlockStatistics(), threading.RLock()
        self._pool, writes = _threads(threads, "block-reads"), _threads(threads, "block-writes")
        committer = _threads(min(threads, 1), "block-commits")
        self._log = SegmentLog(file, superblock, self.index, self.counts, self.lock, writes, committer)

    @classmethod
    def open(
        cls, path: Path, capacity_bytes: int, block_bytes: int, namespace: str, *, direct: bool = True,
        backend: IoBackend | None = None,
    ) -> Self:  # fmt: skip
        """The blocks of `path`; a new file has all of its bytes at once, one that is there keeps its length.

        Raises StorageFullError where the disk has no room; StateError for a file of something else, of other blocks or
        of another namespace, or in use by another process; CommandError for sizes that do not fit.
        """
        superblock = BlockLabel.create(BlockLayout.fit(capacity_bytes, block_bytes), namespace)
        if path.is_block_device():
            raise CommandError(f"blocks must be kept in a file, not on the device {path}: make a file system on it")
        if not path.exists():
            create_file(path, superblock, direct=direct, backend=backend)
        opened = cls.open_existing(path, direct=direct, backend=backend)
        try:
            opened.label.check(path, block_bytes, namespace)
        except BaseException:
            opened.close()
            raise
        return opened

    @classmethod
    def open_existing(
        cls, path: Path, *, direct: bool = True, backend: IoBackend | None = None, threads: int = _THREADS,
        writable: bool = True,
    ) -> Self:  # fmt: skip
        """A file as it was left, whatever it has blocks of; threads: reads in flight, 0: the caller's thread reads.

        writable=False: without the lock, also while another process writes it. Raises StateError; changes nothing.
        """
        open_file = DirectFile.open if writable else DirectFile.open_to_read
        file = open_file(path, direct=direct, backend=backend)
        try:
            opened = cls(file, read_label(file), threads)
            opened._recover()
            if writable:
                file.flush()  # a killed writer's records may be in a cache only; a put of their keys writes nothing
        except BaseException:
            file.close()
            raise
        return opened

    @property
    def path(self) -> Path:
        """The file's path."""
        return self._file.path

    @property
    def failed(self) -> bool:
        """Whether a write has failed: the file takes no more blocks, and serves those that are durable."""
        return self._log.failed

    @property
    def room_blocks(self) -> int:
        """Blocks that can be stored at once, all but pinned ones evicted."""
        return self.layout.slots - 3 * self.layout.segment_slots - len(self.index.pins)

    @property
    def statistics(self) -> BlockStatistics:
        """Counts of this file alone."""
        with self.lock:
            now = BlockStatistics(blocks=len(self.index), capacity_blocks=self.layout.slots, failed_drives=self.failed,
                                  pinned=len(self.index.pins), erases=int(self._log.erases.sum()))  # fmt: skip
            return self.counts + now

    @property
    def life(self) -> BlockStatistics:
        """Counts since the file was made. Of processes before this one, what they wrote beside blocks after their last
        erase is left out."""
        with self.lock:
            return replace(self._log.life, blocks=len(self.index), erases=int(self._log.erases.sum()))

    @property
    def erases(self) -> NDArray[np.int64]:
        """Erases of each segment since the file was made, (segments,)."""
        return self._log.erases

    def close(self) -> None:
        """Wait for what is in flight, and close the file; it may be called twice."""
        self._pool.shutdown()
        self._log.close()
        self._file.close()

    # Use

    def submit_read(self, transfer: BlockTransfer, blocks: Sequence[Get]) -> None:
        """Have blocks read by other threads; each is settled. What is not what its record states is forgotten."""
        with self.lock:
            slots = [self.index.find(key) for _, key, _ in blocks]
            found = sorted((slot, *block) for slot, block in zip(slots, blocks, strict=True) if slot is not None)
            records = self.index.records[[slot for slot, *_ in found]]
            self.counts.misses += len(blocks) - len(found)
        most = max(min(RUN_BYTES // self.layout.slot_bytes, -(-len(found) // _THREADS)), 1)
        for part in (slice(start, start + most) for start in range(0, len(found), most)):
            self._pool.submit(self._read, transfer, found[part], records[part])
        for (number, _, _), slot in zip(blocks, slots, strict=True):
            if slot is None:
                transfer.settle(number, False)

    def submit_write(self, blocks: Sequence[Put]) -> "Future[int]":
        """See SegmentLog.submit; one thread at a time calls."""
        return self._log.submit(blocks)

    def write(self, blocks: Sequence[Put]) -> int:
        """Store blocks, and wait: the result of `submit_write`."""
        return self._log.submit(blocks).result()

    def drain(self) -> None:
        """Wait until all that was submitted is stored."""
        self._log.drain()

    def read_zone(self, segment: int) -> Zone:
        """A segment's records as they are in the file. Raises StateError."""
        zone = self._log.new_zone(segment)
        self._file.read(self.layout.zone_at(segment), zone.memory)
        return zone

    def load(self, slots: Sequence[int], rows: Bytes) -> list[bool]:
        """Fill a row from each slot, rising; which were read."""
        try:
            self._load_all(np.array(slots, np.int64), rows)
            return [True] * len(slots)
        except StateError as error:
            _log.warning("%s", error)
            return [len(slots) > 1 and self.load([slot], rows[n : n + 1])[0] for n, slot in enumerate(slots)]

    # Parts

    def _read(self, transfer: BlockTransfer, blocks: Sequence[tuple[int, int, bytes, Bytes]], records: Records) -> None:
        rows = reuse_buffer(len(blocks) * self.layout.slot_bytes).reshape(len(blocks), -1)
        loaded, lengths = self.load([slot for slot, *_ in blocks], rows), records["length"].tolist()
        fits = [is_there and length == len(target)
                for is_there, length, (*_, target) in zip(loaded, lengths, blocks, strict=True)]  # fmt: skip
        with transfer.using_memory() as allowed:
            targets = [target if allowed and fit else None for fit, (*_, target) in zip(fits, blocks, strict=True)]
            good = copy_good_blocks(records, rows, targets).tolist()
        for row, (slot, number, key, _) in enumerate(blocks):
            served = fits[row] and good[row]
            self._count(slot, key, loaded=loaded[row], good=good[row], served=served)
            transfer.settle(number, served, lengths[row])

    def _load_all(self, slots: NDArray[np.int64], rows: Bytes) -> None:
        starts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        if self._file.backend.queued and len(starts) > 2:
            self._file.read_many(np.array([self.layout.slot_at(slot) for slot in slots.tolist()]), rows)
            return
        for start, end in pairwise(starts):
            self._load_run(slots[start:end].tolist(), rows[start:end])

    def _load_run(self, slots: list[int], rows: Bytes) -> None:
        """Slots one after another, which may be of several segments."""
        size = self.layout.segment_slots
        for _, run in groupby(range(len(slots)), lambda row: slots[row] // size):
            places = list(run)
            self._file.read(self.layout.slot_at(slots[places[0]]), rows[places[0] : places[-1] + 1].reshape(-1))

    def _count(self, slot: int, key: bytes, *, loaded: bool, good: bool, served: bool) -> None:
        with self.lock:
            self.counts.hits += served
            self.counts.misses += not served
            self.counts.read_bytes += self.layout.slot_bytes * loaded
            if (loaded and good) or not self.index.holds(key, slot):  # it was evicted meanwhile
                return
            self.index.remove(key)
            self.counts.failed_reads += not loaded
            self.counts.damaged += loaded
        _log.warning("%s: block %s in slot %d %s", self.path, key.hex(), slot,
                     "is damaged: its CRC32C is wrong" if loaded else "cannot be read")  # fmt: skip

    def _recover(self) -> None:
        """Have the index state what the records of each segment's generation do."""
        found = map_all(self._pool, self._recover_segment, range(self.layout.segments))
        slots = np.concatenate([part.slots for part in found])
        order = np.argsort(self.index.records["sequence"][slots])
        self.index.load(slots[order])
        self._log.before = self._life_of(max(found, key=lambda part: part.generation), self.index.records[slots])
        last = self._log.read_zone(int(slots[order[-1]]) // self.layout.segment_slots if len(slots) else 0)
        self._log.resume(max(part.sequence for part in found), last)

    def _recover_segment(self, segment: int) -> "_Recovered":
        zone = self._log.read_zone(segment)
        places, generation = zone.valid(), zone.generation
        first, records = segment * self.layout.segment_slots, zone.records
        self._log.erases[segment] = zone.erases
        sequences = [generation, *records["sequence"][places].tolist(), *records["generation"][places].tolist()]
        live = places[(records["generation"][places] == generation) & (records["length"][places] > 0)]
        self.index.records[first + live] = records[live]
        return _Recovered(first + live, max(sequences), generation, zone.life)

    def _life_of(self, newest: "_Recovered", records: Records) -> BlockStatistics:
        """Counts as of the newest erase, and the blocks that were written after it."""
        since = records[records["sequence"] > newest.generation]
        written = BlockStatistics(stored=len(since), put_bytes=int(since["length"].sum()),
                                  written_bytes=len(since) * self.layout.slot_bytes)  # fmt: skip
        return BlockStatistics(**newest.life) + written


@dataclass(frozen=True)
class _Recovered:
    """Slots of a segment that have blocks, and the highest number in it."""

    slots: NDArray[np.intp]
    sequence: int
    generation: int
    life: dict[str, int]


def _threads(threads: int, name: str) -> Executor:
    return ThreadPoolExecutor(threads, name) if threads else CallingThread()


def create_file(path: Path, superblock: BlockLabel, *, direct: bool = True, backend: IoBackend | None = None) -> None:
    """A new file, which has its name when it is complete and durable."""
    partial = partial_of(path)
    with DirectFile.create(partial, superblock.layout.file_bytes, direct=direct, backend=backend) as file:
        file.write(0, superblock.pack())
        file.flush()
        try:
            give_name(partial, path, keep_existing=True)
        except FileExistsError:
            partial.unlink(missing_ok=True)  # another process made it meanwhile
        except OSError as error:
            raise StateError(f"{path} cannot be made ({error.strerror}): check path and permissions") from error
