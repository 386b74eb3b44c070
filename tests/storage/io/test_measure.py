"""Rates of a drive: what is asked for is moved, and what is printed says of what it is a fraction."""

import threading
from itertools import product

import pytest

from nearflash.abi.errors import StateError
from nearflash.cli import main as cli
from nearflash.storage.io import measure, queue
from nearflash.storage.io.backend import PositionalBackend
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.io.measure import Rate, faster_queue, measure_drive, measure_random, report
from nearflash.storage.io.profile import find_profile, keep_profile, queue_backend
from nearflash.storage.io.queue import usable_queues


class Counting(PositionalBackend):
    def __init__(self):
        self.calls, self.flushes, self._lock = [], 0, threading.Lock()

    def read(self, fd, memory, offset):
        with self._lock:
            self.calls.append(("read", offset, len(memory)))
        return super().read(fd, memory, offset)

    def write(self, fd, memory, offset):
        with self._lock:
            self.calls.append(("write", offset, len(memory)))
        return super().write(fd, memory, offset)

    def flush(self, fd):
        self.flushes += 1
        super().flush(fd)


def test_every_block_is_moved_once_a_repeat(tmp_path):
    backend, mib = Counting(), 1 << 20
    rates = list(
        measure_drive(tmp_path, blocks=(mib, 2 * mib), depths=(1, 3), file_bytes=8 * mib, repeats=2, backend=backend)
    )
    assert [(r.call, r.block_bytes, r.depth) for r in rates] == [
        (call, block, depth) for block in (mib, 2 * mib) for depth in (1, 3) for call in ("write", "read")
    ]
    assert all(0 < r.low <= r.median <= r.high for r in rates)
    for call, times in (("write", 1 + 2), ("read", 2)):
        for block in (mib, 2 * mib):
            offsets = [offset for name, offset, size in backend.calls if (name, size) == (call, block)]
            assert sorted(offsets) == sorted(2 * times * list(range(0, 8 * mib, block)))
    assert backend.flushes == 2 * 2 * (1 + 2)
    assert list(tmp_path.iterdir()) == []


def test_report():
    slow, fast = Rate("write", 1 << 20, 1, 1.0, 0.9, 1.2), Rate("write", 4 << 20, 2, 2.0, 1.5, 2.5)
    lines = list(report([slow, fast, Rate("read", 1 << 20, 8, 3.0, 3.0, 3.0)]))
    assert lines[0] == "write   1024 KiB x 1    1.00 GB/s  (0.90 to 1.20)   50% of the fastest write"
    assert lines[3] == "fastest write: 4096 KiB, 2 in flight, 2.00 GB/s"
    assert lines[4] == "fastest read: 1024 KiB, 8 in flight, 3.00 GB/s"


def test_pages_at_random_places(tmp_path):
    rates = list(measure_random(tmp_path, pages=(4096, 16384), depths=(1, 4), file_bytes=1 << 20, repeats=2))
    assert [(r.call, r.block_bytes, r.depth) for r in rates] == [
        ("random", page, depth) for depth in (1, 4) for page in (4096, 16384)
    ]
    assert all(0 < r.low <= r.median <= r.high for r in rates) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "refused, faster, expected",
    [("", 0.52, "io_uring"), ("", 0.51, "io_submit"), ("io_uring needs Linux", 0.9, "io_submit")],
)
def test_devices_measure(tmp_path, capsys, monkeypatch, refused, faster, expected):
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    rates = [Rate(call, 4096, 1, 1.0, 1.0, 1.0) for call in ("write", "read")]
    monkeypatch.setattr(measure, "measure_drive", lambda folder: rates if folder == tmp_path else [])
    monkeypatch.setattr(queue, "usable_queues", lambda: {"io_submit": "", "io_uring": refused})
    speeds = {"io_submit": 0.5, "io_uring": faster}

    def random(folder, queues):
        assert queues == [name for name in speeds if not (refused and name == "io_uring")]
        return [Rate("random", 4096, 32, *3 * [speeds[name]], name) for name in queues]

    monkeypatch.setattr(measure, "measure_random", random)
    assert cli.main(["devices", "--measure", str(tmp_path)]) == 0
    *_, fastest, chosen, kept = capsys.readouterr().out.splitlines()
    assert fastest.startswith("fastest random: 4 KiB, 32 in flight, 0.5")
    assert chosen == f"queue for reads at random places: {expected}"
    assert kept == f"kept in {state / 'nearflash' / 'drives.json'}"
    profile = find_profile(tmp_path)
    assert profile.queue == expected and profile.fastest("random") == speeds[expected]
    assert profile.rate("random", 4096, 32) == speeds[expected] and profile.fastest("read") == 1.0
    assert queue_backend(tmp_path).queue == (expected if not usable_queues()[expected] else "io_submit")


def test_a_queue_that_cannot_be_had_any_more(tmp_path, monkeypatch):
    """Measured outside a container, and used within it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert queue_backend(tmp_path).queue == "io_submit"
    keep_profile(tmp_path, [Rate("random", 4096, 32, *3 * [rate], name) for name, rate in
                            (("io_submit", 1.0), ("io_uring", 2.0))], "2026-01-01")  # fmt: skip

    def refuse(*_):
        raise StateError("refused")

    monkeypatch.setitem(queue.QUEUES, "io_uring", refuse)
    assert find_profile(tmp_path).queue == "io_uring" and queue_backend(tmp_path).queue == "io_submit"


def test_the_faster_queue_is_that_of_all_requests():
    def rates(queue, *medians):
        return [Rate("random", 4096 << at, 1, rate, rate, rate, queue) for at, rate in enumerate(medians)]

    base = rates("io_submit", 1.0, 1.0, 2.0)
    assert faster_queue([]) == faster_queue(base) == "io_submit"
    assert faster_queue([*base, *rates("io_uring", 1.2, 1.0, 1.8)]) == "io_submit"  # 2.6 % in the mean
    assert faster_queue([*base, *rates("io_uring", 1.2, 1.0, 1.9)]) == "io_uring"  # 4.5 %
    assert faster_queue(rates("io_uring", 9.0)) == "io_submit"  # compared with nothing


def test_no_such_folder(tmp_path, capsys):
    assert cli.main(["devices", "--measure", str(tmp_path / "none")]) == 2
    assert "none must be a folder on the drive to measure" in capsys.readouterr().err


def test_a_disturbance_does_not_make_one_size_of_pages_slow(tmp_path, monkeypatch):
    """All repeats of a size were read one after another: half a second of another program chose other pages."""
    sizes = []
    monkeypatch.setattr(
        DirectFile, "read_many", lambda file, _, into: sizes.append((into.shape[1], file.backend.queue))
    )
    queues = [name for name, missing in usable_queues().items() if not missing]
    rates = list(
        measure_random(tmp_path, pages=(4096, 16384), depths=(4,), file_bytes=1 << 20, repeats=3, queues=queues)
    )
    assert sizes == list(product((4096, 16384), queues)) * 3
    assert [(rate.block_bytes, rate.queue) for rate in rates] == list(product((4096, 16384), queues))
