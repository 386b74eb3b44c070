"""The writing side of a file of blocks: segments filled one after another, and erased before they are filled again.

Order of writes. Blocks, a flush, their records, a flush: a record counts at the next opening, whoever was told of it,
so it is never on the drive before its block is. Of a segment that is to be filled again the blocks worth keeping are
moved first, in that order; then a header of a new generation erases it, with a flush; only then its slots are written
over. So each block that counts lies whole on the drive at every moment, and no block of an erased generation comes
back. A segment more than is needed is kept free: one that a crash leaves with copies of blocks that were being moved is
not missed.
"""

import itertools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.blocks.index import BlockIndex
from nearflash.storage.blocks.layout import BlockLabel
from nearflash.storage.blocks.record import KEY_BYTES, LIFE, RECORD, Records, Zone, block_checksums
from nearflash.storage.blocks.statistics import BlockStatistics
from nearflash.storage.blocks.transfer import BlockTransfer
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.io.reuse import reuse_buffer

__all__ = ["Put", "SegmentLog"]

Bytes = NDArray[np.uint8]
Put = tuple[BlockTransfer, int, bytes, Bytes]
"""A block to write: its transfer and which one it is there, its key and its bytes."""
_FREE = 2
"""Segments that are kept free."""
_RUN_BYTES = 8 << 20
"""Most of one write."""
_log = logging.getLogger(__name__)


class SegmentLog:
    """Writes blocks to a file, from one thread at a time; others may use `index` and `counts` under `lock`."""

    def __init__(
        self, file: DirectFile, superblock: BlockLabel, index: BlockIndex, counts: BlockStatistics, lock: RLock,
        pool: Executor,
    ) -> None:  # fmt: skip
        self.layout, self._index, self._counts, self._lock = superblock.layout, index, counts, lock
        self.erases = np.zeros(self.layout.segments, np.int64)
        """Of each segment, since the file was made."""
        self._file, self._identity, self._pool = file, superblock.identity, pool
        self._erased: list[Zone] = []
        """Of segments that are ready to be filled."""
        self._free: list[int] = []
        """Segments without blocks, which are erased first."""
        self._staged: list[Records] = []
        """Of blocks that are not in the index yet."""
        self.before = BlockStatistics()
        """Counts of the file's life before it was opened."""
        self._jobs: list[Future[None]] = []
        """Writes of blocks that have no record yet."""
        self.resume(0, self.new_zone(0))

    def new_zone(self, segment: int) -> Zone:
        """Room for a segment's records."""
        memory = aligned_buffer(self.layout.zone_bytes)
        return Zone(memory, self._identity, segment, self.layout.segment_slots)

    def read_zone(self, segment: int) -> Zone:
        """A segment's records as they are in the file; without any where they cannot be read, which is logged."""
        zone = self.new_zone(segment)
        try:
            self._file.read(self.layout.zone_at(segment), zone.memory)
        except StateError as error:
            _log.warning("the blocks of segment %d are misses: %s", segment, error)
        return zone

    def resume(self, sequence: int, last: Zone) -> None:
        """Go on behind the highest number that any record or header has, in the segment that was filled last."""
        begun = last.generation > 0
        self._sequence, self._zone, self._filled = sequence, last, last.count_used() if begun else last.slots
        self._recorded = self._filled
        self._free = [free for free in self._index.free_segments() if not begun or free != last.segment]

    @property
    def life(self) -> BlockStatistics:
        """Counts since the file was made, blocks that are being written among them."""
        put_bytes = sum(int(records["length"].sum()) for records in self._staged)
        staged = BlockStatistics(stored=sum(map(len, self._staged)), put_bytes=put_bytes)
        return self.before + self._counts + staged

    def close(self) -> None:
        """Wait for what is in flight."""
        self._pool.shutdown()

    def write(self, blocks: Sequence[Put]) -> int:
        """Store blocks, as many as a segment has at most, those of stopped transfers left out.

        Returns how many of the first of them are durable, and in the index: fewer where pinned blocks leave no room.
        Raises StateError where the drive fails.
        """
        most, done = max(_RUN_BYTES // self.layout.slot_bytes, 1), 0
        try:
            while done < len(blocks) and (room := self._take_room()):
                part = blocks[done : done + min(most, room)]
                memory, records = self._stage(part)
                if len(records):
                    self._jobs.append(self._pool.submit(self._file.write, self._append(records), memory))
                    self._staged.append(records)
                done += len(part)
            self._flush()
        finally:
            wait(self._jobs)
            self._jobs.clear()
            staged, self._staged = self._staged, []
        self._publish(itertools.chain(*staged))
        return done

    # Blocks to come

    def _stage(self, blocks: Sequence[Put]) -> tuple[Bytes, Records]:
        """Copies of the blocks in slots to come, and their records."""
        size = self.layout.slot_bytes
        memory = reuse_buffer(len(blocks) * size)
        taken: list[tuple[bytes, int]] = []
        for transfer, _, key, data in blocks:
            row = memory[len(taken) * size :][:size]
            with transfer.using_memory() as allowed:
                if allowed:
                    row[: len(data)] = data
                    taken.append((key, len(data)))
            row[len(data) :] = 0
        records = np.zeros(len(taken), RECORD)
        padded = b"".join(key.ljust(KEY_BYTES, b"\0") for key, _ in taken)
        records["key"] = np.frombuffer(padded, np.uint8).reshape(-1, KEY_BYTES)
        records["key_bytes"], records["length"] = [len(key) for key, _ in taken], [length for _, length in taken]
        self._place(records, memory)
        return memory[: len(taken) * size], records

    def _place(self, records: Records, memory: Bytes) -> None:
        """State in the records of staged blocks that they lie in the slots that are filled next."""
        numbers = np.arange(len(records))
        records["identity"] = np.frombuffer(self._identity, np.uint8)
        records["segment"], records["generation"] = self._zone.segment, self._zone.generation
        records["slot"], records["sequence"] = self._filled + numbers, self._sequence + 1 + numbers
        rows = (memory[row * self.layout.slot_bytes :] for row in range(len(records)))
        records["data_crc"] = block_checksums(records, rows)

    def _append(self, records: Records) -> int:
        """Take the slots of placed records; the offset at which their blocks are to be written."""
        self._zone.put(self._filled, records)
        offset = self.layout.slot_at(self.layout.slot_of(records[0]))
        self._filled, self._sequence = self._filled + len(records), self._sequence + len(records)
        self._counts.written_bytes += len(records) * self.layout.slot_bytes
        return offset

    def _publish(self, records: Iterable[np.void]) -> None:
        with self._lock:
            for record in records:
                self._index.add(self.layout.slot_of(record), record)
                self._counts.stored += 1
                self._counts.put_bytes += int(record["length"])

    # Segments

    def _take_room(self) -> int:
        """Slots left in the segment being filled, or in the next one; 0: pinned blocks leave none to erase."""
        while self._filled == self.layout.segment_slots:
            self._write_records()
            if not self._erased and not self._free and not self._reclaim():
                return 0
            self._zone = self._erased.pop(0) if self._erased else self._erase(self._free.pop(0))
            self._filled = self._recorded = 0
            while len(self._erased) + len(self._free) < _FREE and self._reclaim():
                pass
        return self.layout.segment_slots - self._filled

    def _reclaim(self) -> bool:
        """Erase a segment, its blocks that are worth it moved before; False where pinned blocks leave none."""
        room = self.layout.segment_slots - self._filled
        unpublished = (int(records["segment"][0]) for records in self._staged)
        taken = [self._zone.segment, *self._free, *unpublished, *(zone.segment for zone in self._erased)]
        with self._lock:
            victim = self._index.victim(taken, room)
            if victim is None:
                return False
            kept = self._index.worth_moving(victim, room)
            records = self._index.records[kept]
        self._move(kept, records)
        left = self._index.blocks_of(victim)
        self._counts.evicted += len(left)
        self._erased.append(self._erase(victim))  # where it fails its blocks are whole still, and served
        with self._lock:
            for slot in left:
                self._index.remove(self._index.key(slot))
        return True

    def _move(self, slots: Sequence[int], records: Records) -> None:
        """Copy blocks into the segment being filled, durably, and forget those that cannot be read, or are damaged."""
        moved: list[tuple[int, Records]] = []
        for number, slot in enumerate(slots):
            record = records[number : number + 1].copy()
            if (memory := self._load(slot, record)) is not None:
                self._place(record, memory)
                self._file.write(self._append(record), memory)
                moved.append((slot, record))
        if moved:
            self._flush()
        with self._lock:
            for slot, record in moved:
                self._index.move(slot, self.layout.slot_of(record[0]), record[0])
            self._counts.moved += len(moved)

    def _load(self, slot: int, record: Records) -> Bytes | None:
        """The block of a slot; None, and forgotten, where it cannot be read or is not what its record states."""
        memory = reuse_buffer(self.layout.slot_bytes)
        try:
            self._file.read(self.layout.slot_at(slot), memory)
        except StateError as error:
            self._forget(slot, f"cannot be read: {error}", failed_reads=1)
            return None
        if block_checksums(record, [memory]) == record["data_crc"].tolist():
            return memory
        self._forget(slot, "is damaged: its CRC32C is wrong", damaged=1)
        return None

    def _forget(self, slot: int, why: str, **counts: int) -> None:
        with self._lock:
            key = self._index.key(slot)
            self._index.remove(key)
            for name, count in counts.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)
        _log.warning("%s: block %s in slot %d, to be moved, %s", self._file.path, key.hex(), slot, why)

    def _erase(self, segment: int) -> Zone:
        """Durably without blocks, and of a new generation."""
        zone = self.new_zone(segment)
        self._sequence += 1
        self.erases[segment] += 1
        self._counts.written_bytes += zone.memory.nbytes
        zone.erase(self._sequence, int(self.erases[segment]), {name: getattr(self.life, name) for name in LIFE})
        self._file.write(self.layout.zone_at(segment), zone.memory)
        self._file.flush()
        return zone

    def _flush(self) -> None:
        """Make what was written, and the jobs write, durable, with its records."""
        self._write_records()
        self._file.flush()

    def _write_records(self) -> None:
        if self._recorded < self._filled:
            self._flush_blocks()
            span = self._zone.span(self._recorded, self._filled)
            self._file.write(self.layout.zone_at(self._zone.segment) + span.start, self._zone.memory[span])
            self._counts.written_bytes += span.stop - span.start
            self._recorded = self._filled

    def _flush_blocks(self) -> None:
        """Have the blocks on the drive whose records are written next."""
        for job in self._jobs:
            job.result()
        self._file.flush()
