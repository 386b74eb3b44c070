"""Reads and writes through the kernel's queues: the same contract for threads, io_submit and io_uring."""

import errno
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.errors import AlignmentError, StateError, StorageFullError
from nearflash.storage.io.backend import BLOCK_BYTES, PositionalBackend
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.io.kernel_queue import AioQueue
from nearflash.storage.io.queue import QUEUES, QueueBackend, usable_queues
from nearflash.storage.io.uring import UringQueue

BLOCKS = 50
USABLE = [
    pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=missing))
    for name, missing in usable_queues().items()
]


@pytest.fixture
def data():
    memory = aligned_buffer(BLOCKS * BLOCK_BYTES).reshape(BLOCKS, BLOCK_BYTES)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, np.uint8)
    return memory


@pytest.fixture(params=USABLE)
def queue(request):
    return request.param


@pytest.fixture(params=["threads", *USABLE])
def backend(request):
    """Fewer places than requests, so that some wait for others."""
    return PositionalBackend() if request.param == "threads" else QueueBackend(4, request.param)


@pytest.fixture
def file(backend, tmp_path, data):
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=backend) as opened:
        opened.write(0, data.reshape(-1))
        yield opened


@pytest.mark.parametrize("registered", [False, True])
def test_rows_come_from_their_offsets_and_go_there(file, data, registered):
    order = np.random.default_rng(2).permutation(BLOCKS)
    back = aligned_buffer(2 * data.nbytes).reshape(2 * BLOCKS, BLOCK_BYTES)
    if registered:
        file.backend.register(back.reshape(-1))
    for rows in (back[:BLOCKS], back[::2]):
        rows[:] = 0
        file.read_many(order * BLOCK_BYTES, rows)
        np.testing.assert_array_equal(rows, data[order])
        rows[:] = np.random.default_rng(3).integers(0, 256, rows.shape, np.uint8)
        file.write_many(np.arange(BLOCKS)[::-1] * BLOCK_BYTES, rows)
        file.read(0, data.reshape(-1))
        np.testing.assert_array_equal(data[::-1], rows)
    file.read_many(np.zeros(0, np.int64), back[:0])


def test_more_requests_than_the_ring_counts_in_one_round(queue, tmp_path, data):
    """Places of the ring are used again many times over, in depths that are no power of two, too."""
    backend = QueueBackend(5, queue)
    back = aligned_buffer(data.nbytes).reshape(data.shape)
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=backend) as file:
        for seed in range(20):
            order = np.random.default_rng(seed).permutation(BLOCKS)
            file.write_many(order * BLOCK_BYTES, data)
            file.read_many(order * BLOCK_BYTES, back)
            np.testing.assert_array_equal(back, data)
    assert len(backend._idle) == 1


def test_a_read_behind_the_end(file, data):
    back = aligned_buffer(2 * BLOCK_BYTES).reshape(2, BLOCK_BYTES)
    with pytest.raises(StateError, match="must have 8192 bytes at offset 0, not 4096: the file was cut short"):
        file.read_many(np.array([0, data.nbytes]), back)


def test_misaligned_requests_are_refused(file):
    back = aligned_buffer(3 * BLOCK_BYTES)
    for call in (file.read_many, file.write_many):
        with pytest.raises(AlignmentError, match="offset"):
            call(np.array([0, 512]), back[: 2 * BLOCK_BYTES].reshape(2, BLOCK_BYTES))
        with pytest.raises(AlignmentError, match="address"):
            call(np.array([0, 4096]), back[512:][: 2 * BLOCK_BYTES].reshape(2, BLOCK_BYTES))


def test_a_file_that_may_not_grow(file, data):
    """EFBIG, which a quota and a full disk are named as, too; what was there stays."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (data.nbytes, limits[1]))
    try:
        with pytest.raises(StorageFullError, match=r"no room while writing 8192 bytes of .*: free that much space"):
            file.write_many(np.array([0, data.nbytes]), data[:2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    back = aligned_buffer(data.nbytes)
    file.read(0, back)
    np.testing.assert_array_equal(back, data.reshape(-1))


class Faulty:
    """A queue whose `exchange` number `at` gives one result in place of the kernel's, or raises."""

    def __init__(self, kernel, at, fault):
        self.kernel, self.at, self.fault, self.closed = kernel, at, fault, False
        self.prepare = kernel.prepare

    def exchange(self, requests, least):
        taken, rows, results = self.kernel.exchange(requests, least)
        self.at -= 1
        if self.at == 0:
            if isinstance(self.fault, BaseException):
                raise self.fault
            results[0] = self.fault
        return taken, rows, results

    def close(self):
        self.closed = True
        self.kernel.close()


@pytest.mark.parametrize("call", ["read_many", "write_many"])
@pytest.mark.parametrize(
    "fault, error, message",
    [
        (-errno.EIO, StateError, "failed .Input/output error.: check the drive"),
        (-errno.ENOSPC, StorageFullError, "no room while"),
        (OSError(errno.ENOMEM, "no memory"), StateError, "failed .no memory."),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
    ids=["EIO", "ENOSPC", "refused", "interrupt"],
)
def test_a_failure_ends_what_is_in_flight_first(queue, tmp_path, data, call, fault, error, message):
    backend = QueueBackend(8, queue)
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=backend) as file:
        file.write(0, data.reshape(-1))
        faulty = backend._idle[0] = Faulty(backend._idle[0], 3, fault)
        with pytest.raises(error, match=message):
            getattr(file, call)(np.arange(BLOCKS) * BLOCK_BYTES, data)
        assert faulty.closed and not backend._idle
        if queue == "io_uring":
            assert int(faulty.kernel._asked_head[0]) == int(faulty.kernel._returned_tail[0]) >= 8
        back = aligned_buffer(data.nbytes).reshape(data.shape)
        file.read_many(np.arange(BLOCKS) * BLOCK_BYTES, back)
        np.testing.assert_array_equal(back, data)


@pytest.mark.parametrize("result", [-errno.EAGAIN, -errno.EINTR, 0, 512])
def test_what_was_cut_short_is_moved_again(queue, tmp_path, data, result):
    backend = QueueBackend(8, queue)
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=backend) as file:
        for call in (file.write_many, file.read_many):
            backend._idle[0] = Faulty(getattr(backend._idle[0], "kernel", backend._idle[0]), 2, result)
            call(np.arange(BLOCKS) * BLOCK_BYTES, data)
        back = aligned_buffer(data.nbytes)
        file.read(0, back)
        np.testing.assert_array_equal(back, data.reshape(-1))


def test_a_descriptor_that_is_none(queue, data):
    backend = QueueBackend(8, queue)
    for _ in range(2):
        with pytest.raises(OSError, match="Bad file descriptor"):
            backend.read_many(1 << 20, data, np.arange(BLOCKS) * BLOCK_BYTES)


def test_a_child_has_queues_of_its_own(queue, tmp_path, data):
    backend = QueueBackend(8, queue)
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=backend) as file:
        file.write_many(np.arange(BLOCKS) * BLOCK_BYTES, data)
        back = aligned_buffer(data.nbytes).reshape(data.shape)
        if (child := os.fork()) == 0:
            right = False
            try:
                fresh, back[:] = os.open(file.path, os.O_RDONLY | os.O_DIRECT), 0
                empty = not backend._idle
                backend.read_many(fresh, back, np.arange(BLOCKS) * BLOCK_BYTES)
                right = empty and np.array_equal(back, data)
            finally:
                os._exit(0 if right else 1)
        file.read_many(np.arange(BLOCKS) * BLOCK_BYTES, back)
        assert os.waitpid(child, 0)[1] == 0
        file.read_many(np.arange(BLOCKS) * BLOCK_BYTES, back)
        np.testing.assert_array_equal(back, data)


def test_no_queue(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "mips")
    with pytest.raises(StateError, match="a queue of requests needs Linux on x86_64 or aarch64"):
        QueueBackend()
    with pytest.raises(StateError, match=r"io_uring needs Linux on x86_64, not .*: io_submit does the same"):
        QueueBackend(queue="io_uring")
    assert list(usable_queues()) == list(QUEUES) and all(usable_queues().values())
    monkeypatch.undo()
    with pytest.raises(StateError, match="a queue of 1000000000 requests cannot be had"):
        QueueBackend(depth=1_000_000_000)
    if not usable_queues()["io_uring"]:
        with pytest.raises(StateError, match="io_uring with 1000000000 requests cannot be had"):
            QueueBackend(depth=1_000_000_000, queue="io_uring")


@pytest.mark.skipif(bool(usable_queues()["io_uring"]), reason=usable_queues()["io_uring"])
def test_memory_that_cannot_be_registered_is_moved_all_the_same(tmp_path, data):
    """The kernel refuses a page that is not there to be written to; and takes those that are."""
    assert UringQueue(4, [data.reshape(-1)]).registered == 1
    refused = np.frombuffer(bytes(0), np.uint8)
    assert UringQueue(4, [data.reshape(-1), refused]).registered == 0
    backend = QueueBackend(4, "io_uring")
    backend.register(refused)
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=backend) as file:
        file.write_many(np.arange(BLOCKS) * BLOCK_BYTES, data)


def test_callers_at_once_have_queues_of_their_own(queue, tmp_path, data):
    """Each gets its own rows, whoever is first; a failure of one is no other's."""
    order = [np.random.default_rng(seed).permutation(BLOCKS) for seed in range(6)]
    wrong, backend = [], QueueBackend(8, queue)
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=backend) as file:
        file.write(0, data.reshape(-1))

        def work(number):
            back = aligned_buffer(data.nbytes).reshape(data.shape)
            for turn in range(20):
                back[:] = 0
                if number == 5 and turn % 2:
                    with pytest.raises(StateError, match="cut short"):
                        file.read_many(np.array([0, data.nbytes]), back[:2])
                    continue
                if number == 4 and turn == 10:
                    backend.register(back.reshape(-1))
                file.read_many(order[number] * BLOCK_BYTES, back)
                if not np.array_equal(back, data[order[number]]):
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and 1 <= len(backend._idle) <= 6


def test_a_queue_that_is_dropped_gives_everything_back(queue):
    before = open_descriptors()
    backend = QueueBackend(4, queue)
    assert isinstance(backend._idle[0], AioQueue if queue == "io_submit" else UringQueue)
    del backend
    assert open_descriptors() == before


def open_descriptors():
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())
