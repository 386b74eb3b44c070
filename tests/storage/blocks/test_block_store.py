"""Blocks by key: stored durably within a bound, served checked or missed, kept over restarts."""

import errno
import hashlib
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import CommandError, StateError, StorageFullError
from nearflash.storage.blocks import BlockStore
from nearflash.storage.io.backend import PositionalBackend
from nearflash.storage.io.direct import aligned_buffer

BLOCK = 8192
CAPACITY = 2_000_000


def key(number):
    return hashlib.sha256(str(number).encode()).digest()


def data(number, size=BLOCK):
    return np.frombuffer(np.random.default_rng(number).bytes(size), np.uint8)


def open_store(path, capacity=CAPACITY, namespace="model", **options):
    return BlockStore(path, capacity, BLOCK, namespace, direct=False, **options)


def put(store, numbers):
    return store.put([key(number) for number in numbers], [data(number) for number in numbers])


def found(store, numbers):
    """Of those numbers the ones that are served; each must be right."""
    targets = [np.zeros(BLOCK, np.uint8) for _ in numbers]
    hits = store.get([key(number) for number in numbers], targets)
    for number, target, hit in zip(numbers, targets, hits, strict=True):
        assert (target == (data(number) if hit else 0)).all()
    return [number for number, hit in zip(numbers, hits, strict=True) if hit]


class Faulty(PositionalBackend):
    """Fails from when it is told to."""

    def __init__(self):
        self.reads_fail = self.writes_fail = False
        self.gate = threading.Event()
        self.gate.set()

    def read(self, fd, memory, offset):
        self.gate.wait()
        if self.reads_fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, memory, offset)

    def write(self, fd, memory, offset):
        self.gate.wait()
        if self.writes_fail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, memory, offset)


def test_blocks_are_served_until_least_recently_used_ones_are_evicted(tmp_path):
    with open_store(tmp_path / "blocks") as store:
        size = (tmp_path / "blocks").stat().st_size
        assert size <= CAPACITY and (tmp_path / "blocks").stat().st_blocks * 512 >= size
        assert put(store, range(20)) == [True] * 20
        for number in range(20, 900, 20):
            assert all(put(store, range(number, number + 20)))
            assert found(store, range(10)) == list(range(10))  # used again and again
        stats = store.stats()
        assert not store.contains([key(15)])[0] and store.contains([key(899)])[0]
        assert stats.evicted and stats.moved and stats.erases and stats.blocks <= stats.capacity_blocks
        assert 1 < stats.written_per_put < 1.5
        assert (tmp_path / "blocks").stat().st_size == size


def test_blocks_are_there_after_a_restart(tmp_path):
    with open_store(tmp_path / "blocks") as store:
        for number in range(0, 500, 20):
            put(store, range(number, number + 20))
        there = found(store, range(500))
        erases = store.stats().erases
    with open_store(tmp_path / "blocks") as store:
        assert found(store, range(500)) == there and store.stats().erases == erases
        for number in range(500, 600, 20):
            put(store, range(number, number + 20))
        assert found(store, range(500, 600)) == list(range(500, 600))


def test_shorter_blocks_keep_their_length(tmp_path):
    with open_store(tmp_path / "blocks") as store:
        assert store.put([b"short"], [data(1, 100)]) == [True]
        short, long = np.zeros(100, np.uint8), np.zeros(101, np.uint8)
        assert store.get([b"short"], [short]) == [True] and (short == data(1, 100)).all()
        assert store.get([b"short"], [long]) == [False] and not long.any()
        assert store.contains([b"short"]) == [True]  # asked for wrongly; it is not damaged


def test_a_key_that_is_there_is_left_as_it_is(tmp_path):
    with open_store(tmp_path / "blocks") as store:
        put(store, [1])
        assert store.put([key(1), key(2), key(2)], [data(5), data(2), data(2)]) == [True] * 3
        assert found(store, [1, 2]) == [1, 2] and store.stats().stored == 2


def test_pinned_blocks_stay_and_what_they_leave_no_room_for_is_refused(tmp_path):
    with open_store(tmp_path / "blocks", 400_000) as store:
        most = store.stats().capacity_blocks
        for number in range(most // 2):
            put(store, [number])
        pinned = range(5)
        assert store.pin([key(number) for number in [*pinned, 999]]) == [True] * 5 + [False]
        for number in range(1000, 1000 + 3 * most):
            put(store, [number])
        assert found(store, pinned) == list(pinned)
        before = store.stats()
        with pytest.raises(StorageFullError, match=r"room for .* blocks beside pinned ones"):
            put(store, range(5000, 5000 + most))
        assert replace(store.stats()) == before
        store.unpin([key(number) for number in pinned])
        for number in range(6000, 6000 + 2 * most):
            put(store, [number])
        assert found(store, pinned) == []


def test_another_block_size_namespace_version_or_user_is_refused(tmp_path):
    path = tmp_path / "blocks"
    with open_store(path) as store:
        put(store, [1])
        with pytest.raises(StateError, match="in use by another process"):
            open_store(path)
    for size, namespace in ((BLOCK, "another"), (BLOCK * 2, "model")):
        with pytest.raises(StateError, match="must hold blocks of"):
            BlockStore(path, CAPACITY, size, namespace, direct=False)
    with open_store(path) as store:
        assert found(store, [1]) == [1]
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":3', 1))
    with pytest.raises(StateError, match="superblock"):
        open_store(path)
    (tmp_path / "other").write_bytes(b"mine" * 4096)
    with pytest.raises(StateError, match="superblock of a block store"):
        open_store(tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == b"mine" * 4096


def test_bad_arguments_are_named(tmp_path):
    with open_store(tmp_path / "blocks") as store:
        for keys, buffers, message in (
            ([b""], [data(1)], "a key must be"),
            ([b"k" * 49], [data(1)], "a key must be"),
            ([b"k"], [], "a buffer for each key"),
            ([b"k"], [data(1, BLOCK + 1)], "a block must have"),
            ([b"k"], ["text"], "contiguous bytes"),
        ):
            with pytest.raises(CommandError, match=message):
                store.put(keys, buffers)
        with pytest.raises(CommandError, match="writable"):
            store.get([b"k"], [data(1)])
        assert not store.stats().stored
    with pytest.raises(CommandError, match="capacity_bytes"):
        open_store(tmp_path / "small", 10_000)
    with pytest.raises(CommandError, match="namespace"):
        open_store(tmp_path / "small", namespace="")
    with pytest.raises(CommandError, match="weights"):
        open_store([tmp_path / "small"], weights=[1, 2])
    assert not (tmp_path / "small").exists()


def test_a_disk_without_room_is_named_at_the_start(tmp_path):
    with pytest.raises(StorageFullError, match="no room"):
        BlockStore(tmp_path / "blocks", 1 << 50, BLOCK, "model", direct=False)
    assert not list(tmp_path.iterdir())


def test_blocks_lie_on_several_drives_by_weight_and_one_that_takes_no_more_is_read_still(tmp_path):
    backends = Faulty()
    paths = [tmp_path / "one", tmp_path / "two"]
    with open_store(paths, weights=[1, 3]) as store:
        put(store, range(100))
        assert [len(file.index) for file in store._files] == [25, 75]
    with open_store(paths, weights=[1, 3]) as store:
        assert found(store, range(100)) == list(range(100))
        store._files[1]._file.backend = backends
        backends.writes_fail = True
        stored = put(store, range(100, 140))
        left = found(store, range(140))
        assert stored.count(True) < 40 and len(left) == 100 + stored.count(True)
        assert store.stats().failed_drives == 1
        assert all(put(store, range(200, 230))) and found(store, range(200, 230)) == list(range(200, 230))


def test_reads_that_fail_are_misses_and_the_blocks_can_be_put_again(tmp_path):
    backend = Faulty()
    with open_store(tmp_path / "blocks", backend=backend) as store:
        put(store, range(4))
        backend.reads_fail = True
        assert found(store, range(4)) == [] and store.stats().failed_reads == 4
        backend.reads_fail = False
        assert all(put(store, range(4))) and found(store, range(4)) == [0, 1, 2, 3]


class OneBadPlace(PositionalBackend):
    """Of one offset reads fail."""

    bad = None

    def read(self, fd, memory, offset):
        if self.bad is not None and offset <= self.bad < offset + len(memory):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, memory, offset)


def move_pinned(store, numbers):
    """Put until the segment of pinned blocks was erased, these moved before."""
    store.pin([key(number) for number in numbers])
    for number in range(1000, 1000 + 2 * store.stats().capacity_blocks, 5):
        if not store.stats().moved:
            assert all(put(store, range(number, number + 5)))


def test_a_block_that_cannot_be_read_when_it_is_to_be_moved_is_one_miss(tmp_path, caplog):
    """It made the whole file fail."""
    backend = OneBadPlace()
    with open_store(tmp_path / "blocks", backend=backend) as store:
        put(store, range(5))
        file = store._files[0]
        backend.bad = file.layout.slot_at(file.index.find(key(2)))
        move_pinned(store, range(5))
        stats, backend.bad = store.stats(), None
        assert found(store, range(5)) == [0, 1, 3, 4] and stats.moved == 4
        assert (stats.failed_reads, stats.failed_drives) == (1, 0)
        assert f"block {key(2).hex()}" in caplog.text and "cannot be read" in caplog.text


def test_a_block_that_is_damaged_when_it_is_to_be_moved_is_counted_and_named(tmp_path, caplog):
    path = tmp_path / "blocks"
    with open_store(path) as store:
        put(store, range(5))
        file = store._files[0]
        with path.open("r+b") as image:
            image.seek(file.layout.slot_at(file.index.find(key(2))))
            image.write(b"other")
        move_pinned(store, range(5))
        assert found(store, range(5)) == [0, 1, 3, 4] and store.stats().damaged == 1
        assert f"block {key(2).hex()}" in caplog.text


def test_a_write_that_fails_loses_no_durable_block(tmp_path):
    """All blocks of its file were misses until the next start; those about to be evicted or moved were, too."""
    backend, path = Faulty(), tmp_path / "blocks"
    with open_store(path, 400_000, backend=backend) as store:
        for number in range(0, 100, 5):
            put(store, range(number, number + 5))
        there = found(store, range(100))
        backend.writes_fail = True
        assert put(store, range(200, 220)) == [False] * 20
        assert found(store, range(100)) == there and store.stats().failed_drives == 1
        assert put(store, [there[0], 300]) == [True, False]
    with open_store(path, 400_000) as store:
        assert found(store, range(100)) == there


def test_blocks_are_settled_where_memory_ends(tmp_path):
    """Whoever waited for them hung, where an error without a name came up in another thread."""

    class Full(PositionalBackend):
        def write(self, fd, memory, offset):
            raise MemoryError

    with open_store(tmp_path / "blocks") as store:
        assert put(store, [1]) == [True]
        file = store._files[0]._file
        before, file.backend = file.backend, Full()
        late = store.submit_put([key(number) for number in range(2, 60)], [data(number) for number in range(2, 60)])
        assert not any(late.result(10))
        file.backend = before
        assert put(store, [2]) == [True] and found(store, [1, 2]) == [1, 2]


def test_segments_whose_records_cannot_be_read_are_misses_and_named(tmp_path, caplog):
    backend = OneBadPlace()
    with open_store(tmp_path / "blocks") as store:
        put(store, range(100))
        layout = store._files[0].layout
    backend.bad = layout.zone_at(1)
    with open_store(tmp_path / "blocks", backend=backend) as store:
        assert len(found(store, range(100))) == 100 - layout.segment_slots and "segment 1" in caplog.text


def test_a_stopped_transfer_leaves_its_memory_alone(tmp_path):
    """Whoever gave a deadline uses the memory for something else afterwards."""
    backend = Faulty()
    with open_store(tmp_path / "blocks", backend=backend) as store:
        put(store, [1])
        backend.gate.clear()
        target = np.zeros(BLOCK, np.uint8)
        get = store.submit_get([key(1)], [target])
        with pytest.raises(TimeoutError, match="1 blocks are left"):
            get.result(0.01)
        first = store.submit_put([key(2)], [data(2)])
        memory = data(3).copy()
        late = store.submit_put([key(3)], [memory])
        get.stop()
        late.stop()
        memory[:] = 0
        backend.gate.set()
        assert get.result() == [False] and late.result() == [False] and first.result() == [True]
        put(store, [4])  # behind both
        assert not target.any() and found(store, [2, 3, 4]) == [2, 4]


def test_blocks_that_are_written_in_place_have_no_record_once_stopped(tmp_path):
    """Aligned blocks are not copied: what the drive reads after a stop may be something else's."""

    class Held(PositionalBackend):
        began, gate = threading.Event(), threading.Event()

        def gather(self, fd, memories, offset):
            self.began.set()
            self.gate.wait()
            return super().gather(fd, memories, offset)

    backend, memory = Held(), aligned_buffer(2 * BLOCK).reshape(2, BLOCK)
    memory[:] = data(1), data(2)
    with open_store(tmp_path / "blocks", backend=backend) as store:
        late = store.submit_put([key(1)], memory[:1])
        assert backend.began.wait(10)
        late.stop()
        memory[0] = 0
        backend.gate.set()
        assert late.result() == [False] and store.put([key(2)], memory[1:]) == [True]
        assert store.contains([key(1), key(2)]) == [False, True]
    with open_store(tmp_path / "blocks") as store:
        assert found(store, [1, 2]) == [2] and not store.stats().damaged
        assert put(store, [1]) == [True] and found(store, [1]) == [1]


def test_puts_beyond_the_bytes_in_flight_are_refused_at_once(tmp_path):
    backend = Faulty()
    with open_store(tmp_path / "blocks", backend=backend, in_flight_bytes=3 * BLOCK) as store:
        put(store, [0])
        backend.gate.clear()
        first = store.submit_put([key(1), key(2)], [data(1), data(2)])
        second = store.submit_put([key(3), key(4)], [data(3), data(4)])
        assert second.is_done() and second.result() == [False, False] and not first.is_done()
        backend.gate.set()
        assert first.result() == [True, True] and store.stats().refused == 2


def test_no_record_is_on_the_drive_before_its_block_is(tmp_path):
    """A process that was killed between the two left keys whose next put reported them durable, and wrote nothing."""

    class Killed(PositionalBackend):
        def write(self, fd, memory, offset):
            return len(memory) if len(memory) >= BLOCK else super().write(fd, memory, offset)

        def flush(self, fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path / "blocks") as store:
        assert put(store, [9]) == [True]  # a segment is begun
        store._files[0]._file.backend = Killed()
        assert put(store, range(4)) == [False] * 4
    with open_store(tmp_path / "blocks") as store:
        assert put(store, range(4)) == [True] * 4 and found(store, range(4)) == [0, 1, 2, 3]


def test_one_flush_does_for_records_and_for_the_blocks_of_the_next_batch(tmp_path):
    """Never for records and their own blocks."""
    log, held, begun = [], threading.Event(), threading.Event()

    class Logged(PositionalBackend):
        def write(self, fd, memory, offset):
            log.append("block" if len(memory) >= BLOCK else "record")
            return super().write(fd, memory, offset)

        def flush(self, fd):
            begun.set()
            held.wait()
            log.append("flush")

    with open_store(tmp_path / "blocks") as store:
        assert put(store, [9]) == [True]  # a segment is begun
        store._files[0]._file.backend = Logged()
        first = store.submit_put([key(0)], [data(0)])
        assert begun.wait(10)
        others = []
        for number in (1, 2):
            others.append(store.submit_put([key(number)], [data(number)]))
            while log.count("block") < 1 + number:
                time.sleep(0.001)
        held.set()
        assert [transfer.result(10) for transfer in (first, *others)] == [[True]] * 3
    assert log == ["block"] * 3 + ["flush", "record", "flush", "record", "flush", "record", "flush"]


def test_a_flush_that_fails_ends_the_batch_before_too(tmp_path):
    """The next flush may succeed, and has not written what the one before has lost."""
    held, begun, fails = threading.Event(), threading.Event(), [False, True]

    class Failing(PositionalBackend):
        def flush(self, fd):
            begun.set()
            held.wait()
            if fails and fails.pop(0):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path / "blocks") as store:
        assert put(store, [9]) == [True]
        store._files[0]._file.backend = Failing()
        transfers = [store.submit_put([key(0)], [data(0)])]
        assert begun.wait(10)
        transfers.append(store.submit_put([key(1)], [data(1)]))
        held.set()
        assert [transfer.result(10) for transfer in transfers] == [[False]] * 2 and not fails
        assert found(store, [0, 1, 9]) == [9] and store.stats().failed_drives == 1


def test_erases_are_flushed_before_their_slots_are_written(tmp_path):
    """Together with other writes; a block of an erased generation came back otherwise."""
    log = []

    class Logged(PositionalBackend):
        def write(self, fd, memory, offset):
            log.append((offset, len(memory)))
            return super().write(fd, memory, offset)

        def flush(self, fd):
            log.append("flush")

    with open_store(tmp_path / "blocks", 400_000, backend=Logged()) as store:
        layout = store._files[0].layout
        puts = 4 * layout.slots // 5
        for number in range(puts):
            assert all(put(store, range(5 * number, 5 * number + 5)))
    unflushed, erases = set(), 0
    for entry in log:
        if entry == "flush":
            unflushed.clear()
            continue
        segment, place = divmod(entry[0] - layout.zone_at(0), layout.segment_bytes)
        if place == 0 and entry[1] == layout.zone_bytes:
            unflushed.add(segment)
            erases += 1
        assert place == 0 or segment not in unflushed
    assert erases > 10 and log.count("flush") < 2 * puts + erases


def test_what_a_killed_writer_left_is_flushed_before_it_counts(tmp_path):
    """A put of a key that is there writes nothing, and reports it durable."""
    backend, flushes = PositionalBackend(), []
    backend.flush = flushes.append
    with open_store(tmp_path / "blocks") as store:
        put(store, [1])
    with open_store(tmp_path / "blocks", backend=backend) as store:
        assert flushes and put(store, [1]) == [True] and store.stats().stored == 0


def test_closing_stores_all_that_waits(tmp_path):
    """Blocks beyond a segment's worth were never settled: whoever waited for them hung."""
    backend = Faulty()
    with open_store(tmp_path / "blocks", 400_000, backend=backend) as store:
        backend.gate.clear()
        count = 3 * store._files[0].layout.segment_slots
        transfer = store.submit_put([key(n) for n in range(count)], [data(n) for n in range(count)])
        threading.Timer(0.1, backend.gate.set).start()
    assert transfer.result(5) == [True] * count


def test_threads_put_and_get_at_once(tmp_path):
    with open_store(tmp_path / "blocks", 600_000) as store:
        bad = []

        def work(thread):
            rng = np.random.default_rng(thread)
            for _ in range(20):
                numbers = rng.integers(0, 80, 5).tolist()
                store.put([key(number) for number in numbers], [data(number) for number in numbers])
                try:
                    found(store, numbers)
                except AssertionError as error:
                    bad.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not bad and store.stats().evicted and not store.stats().damaged
