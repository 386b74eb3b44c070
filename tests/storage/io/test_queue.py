"""Reads through the kernel's queue."""

import errno
import threading

import numpy as np
import pytest

from nearflash.abi.errors import AlignmentError, StateError
from nearflash.storage.io.backend import BLOCK_BYTES, PositionalBackend
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.io.queue import QueueBackend

BLOCKS = 50


@pytest.fixture
def data():
    memory = aligned_buffer(BLOCKS * BLOCK_BYTES).reshape(BLOCKS, BLOCK_BYTES)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, np.uint8)
    return memory


@pytest.fixture(
    params=[PositionalBackend, QueueBackend, lambda: QueueBackend(depth=4)], ids=["threads", "queue", "short"]
)
def file(request, tmp_path, data):
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=request.param()) as opened:
        opened.write(0, data.reshape(-1))
        yield opened


def test_rows_come_from_their_offsets(file, data):
    order = np.random.default_rng(2).permutation(BLOCKS)
    back = aligned_buffer(data.nbytes).reshape(data.shape)
    for _ in range(3):
        back[:] = 0
        file.read_many(order * BLOCK_BYTES, back)
        np.testing.assert_array_equal(back, data[order])
    file.read_many(np.zeros(0, np.int64), back[:0])


def test_a_read_behind_the_end(file, data):
    back = aligned_buffer(2 * BLOCK_BYTES).reshape(2, BLOCK_BYTES)
    with pytest.raises(StateError, match="must have 8192 bytes at offset 0, not 4096: the file was cut short"):
        file.read_many(np.array([0, data.nbytes]), back)


def test_misaligned_reads_are_refused(file):
    back = aligned_buffer(3 * BLOCK_BYTES)
    with pytest.raises(AlignmentError, match="offset"):
        file.read_many(np.array([0, 512]), back[: 2 * BLOCK_BYTES].reshape(2, BLOCK_BYTES))
    with pytest.raises(AlignmentError, match="address"):
        file.read_many(np.array([0, 4096]), back[512:][: 2 * BLOCK_BYTES].reshape(2, BLOCK_BYTES))


def test_a_failure_is_raised_when_all_reads_have_ended(tmp_path, data, monkeypatch):
    backend = QueueBackend(depth=8)
    back = aligned_buffer(data.nbytes).reshape(data.shape)
    with DirectFile.create(tmp_path / "f", data.nbytes, backend=backend) as file:
        file.write(0, data.reshape(-1))
        with pytest.raises(OSError, match="Bad file descriptor"):
            backend.read_many(1 << 20, back, np.arange(BLOCKS) * BLOCK_BYTES)
        submit, calls = backend._submit, []
        real = backend._call

        def fails_later(number, *arguments):
            if number == submit:
                calls.append(number)
                if len(calls) == 3:
                    raise OSError(errno.EIO, "broken")
            return real(number, *arguments)

        monkeypatch.setattr(backend, "_call", fails_later)
        with pytest.raises(StateError, match="reading"):
            file.read_many(np.arange(BLOCKS) * BLOCK_BYTES, back)
        file.read_many(np.arange(BLOCKS) * BLOCK_BYTES, back)
        np.testing.assert_array_equal(back, data)


def test_no_queue(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "mips")
    with pytest.raises(StateError, match="a queue of reads needs Linux on x86_64 or aarch64"):
        QueueBackend()
    monkeypatch.undo()
    with pytest.raises(StateError, match="a queue of 1000000000 reads cannot be had"):
        QueueBackend(depth=1_000_000_000)


def test_callers_at_once_have_queues_of_their_own(tmp_path, data):
    """Each gets its own rows, whoever is first; a failure of one is no other's."""
    order = [np.random.default_rng(seed).permutation(BLOCKS) for seed in range(6)]
    wrong, backend = [], QueueBackend(depth=8)
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
                file.read_many(order[number] * BLOCK_BYTES, back)
                if not np.array_equal(back, data[order[number]]):
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and 1 <= len(backend._idle) <= 6
