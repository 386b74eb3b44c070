"""The writing side of a file of blocks: segments filled one after another, and erased before they are filled again.

Order of writes. Blocks, a flush, their records, a flush: a record counts at the next opening, whoever was told of it,
so it is never on the drive before its block is. Of a segment that is to be filled again the blocks worth keeping are
moved first, in that order; then a header of a new generation erases it; its slots are written over only when a flush
has begun and ended after that. So each block that counts lies whole on the drive at every moment, and no block of an
erased generation comes back. A segment more than is needed is kept free: one that a crash leaves with copies of blocks
that were being moved is not missed.

Batches of blocks are staged one after another: their slots are chosen, and other threads copy, check and write them. A
thread of its own commits them, in the same order: it waits for their writes, then flushes and writes records, while the
next batch is written. One flush does for the records of a batch and for the blocks of the next, where one waits: a
drive writes at half its rate or less while it flushes.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from threading import Lock, RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.blocks.index import BlockIndex
from nearflash.storage.blocks.layout import BlockLabel
from nearflash.storage.blocks.record import KEY_BYTES, LIFE, RECORD, Records, Zone, block_checksums
from nearflash.storage.blocks.statistics import BlockStatistics
from nearflash.storage.blocks.transfer import BlockTransfer
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.support.native import find_address

__all__ = ["Put", "SegmentLog"]

Bytes = NDArray[np.uint8]
Put = tuple[BlockTransfer, int, bytes, Bytes]
"""A block to write: its transfer and which one it is there, its key and its bytes."""
_FREE = 2
"""Segments that are kept free."""
_RUN_BYTES = 8 << 20
"""Most of one write."""
_BATCHES = 4
"""That are written or committed at one time: one's records, the next one's blocks, and two that are staged: a flush
waits for what is written meanwhile, too, and with one the drive had nothing to do when it ended."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    """Blocks that are written to slots next to each other; the job's result: their records."""

    zone: Zone
    first: int
    count: int
    job: "Future[Records]"
    moved_from: int | None = None


@dataclass(eq=False)
class _Batch:
    """Blocks that are committed together."""

    runs: list[_Run] = field(default_factory=list)
    done: int = 0
    """How many of the first of its blocks were staged: the result."""
    stored: int = 0
    put_bytes: int = 0
    result: "Future[int]" = field(default_factory=Future)


class SegmentLog:
    """Writes blocks to a file, from one thread at a time; others may use `index` and `counts` under `lock`."""

    def __init__(
        self, file: DirectFile, superblock: BlockLabel, index: BlockIndex, counts: BlockStatistics, lock: RLock,
        pool: Executor, committer: Executor,
    ) -> None:  # fmt: skip
        self.layout, self._index, self._counts, self._lock = superblock.layout, index, counts, lock
        self.erases = np.zeros(self.layout.segments, np.int64)
        """Of each segment, since the file was made."""
        self._file, self._identity, self._pool = file, superblock.identity, pool
        self._committer = committer
        self._erased: deque[tuple[int, Zone]] = deque()
        """Segments to fill next, each with the number of its erase."""
        self._erase_count = self._durable_erases = 0
        """Erases that were written; of them those that are durable."""
        self._flushing = Lock()
        self._free: list[int] = []
        """Segments without blocks, which are erased first."""
        self.failed = False
        """A write or a flush has failed: nothing is known about what was written last, and no more is. What was durable
        before is read still: nothing has been written over it."""
        self._batches: list[_Batch] = []
        """Whose blocks are not in the index yet."""
        self._recorded: list[_Batch] = []
        """Whose records are written, and not flushed: none but the last one that was committed."""
        self._uncommitted = 0
        """Batches that the committer has not taken yet."""
        self._results: deque[Future[int]] = deque()
        self.before = BlockStatistics()
        """Counts of the file's life before it was opened."""
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
        self._free = [free for free in self._index.free_segments() if not begun or free != last.segment]

    @property
    def life(self) -> BlockStatistics:
        """Counts since the file was made, blocks that are being written among them."""
        with self._lock:
            waiting = [BlockStatistics(stored=batch.stored, put_bytes=batch.put_bytes) for batch in self._batches]
            return reduce(add, waiting, self.before + self._counts)

    def close(self) -> None:
        """Wait for what is in flight."""
        self._committer.shutdown()
        self._pool.shutdown()

    def drain(self) -> None:
        """Wait until all batches are committed."""
        while self._results:
            wait([self._results.popleft()])

    def submit(self, blocks: Sequence[Put]) -> "Future[int]":
        """Store blocks, a segment's at most, those of stopped transfers left out; one thread at a time calls.

        The result: how many of the first of them are durable, and in the index: fewer where pinned blocks leave no
        room, none where the drive fails, which takes no more blocks then.
        """
        while len(self._results) >= _BATCHES:
            wait([self._results.popleft()])
        batch = self._open_batch()
        try:
            batch.done = 0 if self.failed else self._stage_all(batch, blocks)
        except StateError as error:
            self._fail(error)
        except BaseException:
            with self._lock:
                self._batches.remove(batch)
            raise
        self._submit_commit(batch)
        self._results.append(batch.result)
        return batch.result

    # Blocks to come

    def _open_batch(self) -> _Batch:
        batch = _Batch()
        with self._lock:
            self._batches.append(batch)
        return batch

    def _stage_all(self, batch: _Batch, blocks: Sequence[Put]) -> int:
        """Have blocks written; how many of the first of them."""
        most, done = max(_RUN_BYTES // self.layout.slot_bytes, 1), 0
        while done < len(blocks) and (room := self._take_room() or self._take_room_of_others()):
            part = blocks[done : done + min(most, room)]
            with self._lock:
                batch.stored += len(part)
                batch.put_bytes += sum(len(data) for *_, data in part)
            self._stage(batch, len(part), self._write_blocks, part)
            done += len(part)
        return done

    def _stage(self, batch: _Batch, count: int, write: Callable[[Records, Any], None], given: Any) -> _Run:
        """Take the next slots, and have other threads write them, and state in the records what they have written."""
        records, numbers = np.zeros(count, RECORD), np.arange(count)
        records["identity"] = np.frombuffer(self._identity, np.uint8)
        records["segment"], records["generation"] = self._zone.segment, self._zone.generation
        records["slot"], records["sequence"] = self._filled + numbers, self._sequence + 1 + numbers

        def job() -> Records:
            write(records, given)
            return records

        zone, first = self._zone, self._filled
        self._filled, self._sequence = self._filled + count, self._sequence + count
        batch.runs.append(run := _Run(zone, first, count, self._pool.submit(job)))
        return run

    def _write_blocks(self, records: Records, blocks: Sequence[Put]) -> None:
        """Write blocks, from where they are if they can be written so; of stopped transfers nothing is stored."""
        padded = b"".join(key.ljust(KEY_BYTES, b"\0") for *_, key, _ in blocks)
        records["key"] = np.frombuffer(padded, np.uint8).reshape(-1, KEY_BYTES)
        records["key_bytes"] = [len(key) for *_, key, _ in blocks]
        offset = self.layout.slot_at(self.layout.slot_of(records[0]))
        if all(self._fills_slot(data) for *_, data in blocks):
            self._write_in_place(records, blocks, offset)
        else:
            self._write_copies(records, blocks, offset)

    def _fills_slot(self, data: Bytes) -> bool:
        return len(data) == self.layout.slot_bytes and find_address(data) % BLOCK_BYTES == 0

    def _write_in_place(self, records: Records, blocks: Sequence[Put], offset: int) -> None:
        """Write blocks from their own memory, which is as it was checked where the transfer is not stopped by then.

        Stopping a transfer does not wait for the drive: what it reads then has no record.
        """
        with ExitStack() as stack:
            transfers = {transfer for transfer, *_ in blocks}
            allowed = {transfer: stack.enter_context(transfer.using_memory()) for transfer in transfers}
            records["length"] = [len(data) * allowed[transfer] for transfer, _, _, data in blocks]
            records["data_crc"] = block_checksums(records, [data for *_, data in blocks])
        self._file.gather(offset, [data.data for *_, data in blocks])
        self._count(written_bytes=len(blocks) * self.layout.slot_bytes)
        records["length"][[transfer.is_stopped() for transfer, *_ in blocks]] = 0

    def _write_copies(self, records: Records, blocks: Sequence[Put], offset: int) -> None:
        size = self.layout.slot_bytes
        memory = reuse_buffer(len(blocks) * size)
        rows = memory.reshape(len(blocks), size)
        for row, record, (transfer, _, _, data) in zip(rows, records, blocks, strict=True):
            with transfer.using_memory() as allowed:
                if allowed:
                    row[: len(data)] = data
                    record["length"] = len(data)
            row[int(record["length"]) :] = 0
        self._write_rows(records, rows, offset)

    def _write_rows(self, records: Records, rows: Bytes, offset: int) -> None:
        records["data_crc"] = block_checksums(records, rows)
        self._file.write(offset, rows.reshape(-1))
        self._count(written_bytes=rows.nbytes)

    def _submit_commit(self, batch: _Batch) -> None:
        with self._lock:
            self._uncommitted += 1
        self._committer.submit(self._commit, batch)

    def _commit(self, batch: _Batch) -> None:
        """Have a batch's blocks on the drive, the records of the one before, too, then this one's: in turn, in a flush
        of their own where no other batch waits for one."""
        with self._ending(batch):
            self._record(batch)
        with self._lock:
            self._uncommitted -= 1
            last = not self._uncommitted
        if last:
            with self._ending():
                self._flush()
                self._end_recorded()

    @contextmanager
    def _ending(self, *batches: _Batch) -> Iterator[None]:
        """These batches and the recorded one end where it fails: whoever waits for them must not wait forever."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, StateError):
                self._fail(error)
            failed, self._recorded = [*batches, *self._recorded], []
            self._end(failed, 0 if isinstance(error, StateError) else error)

    def _record(self, batch: _Batch) -> None:
        wait([run.job for run in batch.runs])
        records = [run.job.result() for run in batch.runs]
        if self.failed or not batch.runs:
            self._end([batch], 0 if self.failed else batch.done)
            return
        self._flush_blocks()
        self._end_recorded()
        for run, own in zip(batch.runs, records, strict=True):
            run.zone.put(run.first, own)
        for zone in {run.zone.segment: run.zone for run in batch.runs}.values():
            runs = [run for run in batch.runs if run.zone is zone]
            self._write_records(zone, runs[0].first, runs[-1].first + runs[-1].count)
        self._recorded = [batch]

    def _end_recorded(self) -> None:
        """The records of the last batch are durable."""
        for batch in self._recorded:
            self._publish(batch)
            self._end([batch], batch.done)
        self._recorded = []

    def _end(self, batches: Sequence[_Batch], result: int | BaseException) -> None:
        for batch in batches:
            with self._lock:
                self._batches.remove(batch)
            if isinstance(result, BaseException):
                batch.result.set_exception(result)
            else:
                batch.result.set_result(result)

    def _flush_blocks(self) -> None:
        """Have the blocks on the drive whose records are written next."""
        self._flush()

    def _flush(self) -> None:
        """Have on the drive what was written before. Never after a flush has failed: the next one may not say so."""
        with self._flushing:
            if self.failed:
                raise StateError(f"{self._file.path} takes no more blocks")
            erases = self._erase_count
            try:
                self._file.flush()
            except StateError as error:
                self._fail(error)
                raise
            self._durable_erases = erases

    def _write_records(self, zone: Zone, first: int, end: int) -> None:
        span = zone.span(first, end)
        self._file.write(self.layout.zone_at(zone.segment) + span.start, zone.memory[span])
        self._count(written_bytes=span.stop - span.start)

    def _publish(self, batch: _Batch) -> None:
        with self._lock:
            for run in batch.runs:
                self._publish_run(run)
            batch.stored = batch.put_bytes = 0  # they are counted now

    def _publish_run(self, run: _Run) -> None:
        records = run.job.result()
        records = records[records["length"] > 0]
        slots = run.zone.segment * self.layout.segment_slots + records["slot"].astype(np.intp)
        if run.moved_from is None:
            self._index.add(slots, records)
            self._count(stored=len(records), put_bytes=int(records["length"].sum(dtype=np.int64)))
        else:
            self._index.move(run.moved_from, slots, records)
            self._count(moved=len(records))

    def _fail(self, error: StateError) -> None:
        if not self.failed:
            _log.error("%s is read only from now on: %s", self._file.path, error)
        self.failed = True

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)

    # Segments

    def _take_room(self) -> int:
        """Slots left in the segment being filled, or in the next one; 0: pinned blocks leave none to erase."""
        while self._filled == self.layout.segment_slots:
            if not self._erased and not self._free and not self._reclaim():
                return 0
            if not self._erased:
                self._erase(self._free.pop(0))
            number, self._zone = self._erased.popleft()
            if number > self._durable_erases:
                self._flush()
            self._filled = 0
            while len(self._erased) + len(self._free) < _FREE and self._reclaim():
                pass
        return self.layout.segment_slots - self._filled

    def _take_room_of_others(self) -> int:
        """Slots as `_take_room` finds them when no other batch is in flight."""
        self.drain()
        return self._take_room()

    def _reclaim(self) -> bool:
        """Erase a segment, its blocks that are worth it moved before; False where pinned blocks leave none."""
        room = self.layout.segment_slots - self._filled
        with self._lock:
            in_flight = [run.zone.segment for batch in self._batches for run in batch.runs]
            taken = [self._zone.segment, *self._free, *in_flight, *(zone.segment for _, zone in self._erased)]
            victim = self._index.victim(taken, room)
            if victim is None:
                return False
            kept = self._index.worth_moving(victim, room)
            records = self._index.records[kept]
        if kept:
            self._move(kept, records)
        left = self._index.blocks_of(victim)
        self._count(evicted=len(left))
        self._erase(victim)  # where it fails its blocks are whole still, and served
        with self._lock:
            for slot in left:
                self._index.remove(self._index.key(slot))
        return True

    def _move(self, slots: Sequence[int], records: Records) -> None:
        """Copy blocks into the segment being filled, durably, and forget those that cannot be read, or are damaged.

        Raises StateError where that cannot be written.
        """
        batch = self._open_batch()
        for number, slot in enumerate(slots):
            if (memory := self._load(slot, records[number : number + 1])) is not None:
                run = self._stage(batch, 1, self._write_copy, (records[number], memory))
                run.moved_from = slot
        self._submit_commit(batch)
        batch.result.result()
        if self.failed:
            raise StateError(f"{self._file.path} takes no more blocks")

    def _write_copy(self, records: Records, source: tuple[np.void, Bytes]) -> None:
        """Write a block that was loaded, under its record's key and length."""
        record, memory = source
        for name in ("key", "key_bytes", "length"):
            records[name] = record[name]
        self._write_rows(records, memory[None], self.layout.slot_at(self.layout.slot_of(records[0])))

    def _load(self, slot: int, record: Records) -> Bytes | None:
        """The block of a slot; None, and forgotten, where it cannot be read or is not what its record states."""
        memory = reuse_buffer(self.layout.slot_bytes)
        try:
            self._file.read(self.layout.slot_at(slot), memory)
        except StateError as error:
            self._forget(slot, f"cannot be read: {error}", failed_reads=1)
            return None
        if block_checksums(record, [memory])[0] == record["data_crc"][0]:
            return memory
        self._forget(slot, "is damaged: its CRC32C is wrong", damaged=1)
        return None

    def _forget(self, slot: int, why: str, **counts: int) -> None:
        with self._lock:
            key = self._index.key(slot)
            self._index.remove(key)
            self._count(**counts)
        _log.warning("%s: block %s in slot %d, to be moved, %s", self._file.path, key.hex(), slot, why)

    def _erase(self, segment: int) -> None:
        """Without blocks, and of a new generation; durable at the next flush."""
        zone = self.new_zone(segment)
        self._sequence += 1
        self.erases[segment] += 1
        self._count(written_bytes=zone.memory.nbytes)
        zone.erase(self._sequence, int(self.erases[segment]), {name: getattr(self.life, name) for name in LIFE})
        self._file.write(self.layout.zone_at(segment), zone.memory)
        self._erase_count += 1
        self._erased.append((self._erase_count, zone))
