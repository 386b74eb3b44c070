"""Threads: what the machine leaves idle, unless a user says otherwise."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearflash.abi.errors import CommandError
from nearflash.support import threads


def stat(monkeypatch, *samples):
    """/proc/stat as it is read one time after another: (busy, idle) ticks of each processor."""
    remaining = [
        "cpu 0 0 0 0 0 0 0 0 0 0\n"
        + "".join(f"cpu{n} {busy} 0 0 {idle} 0 0 0 0 0 0\n" for n, (busy, idle) in enumerate(sample))
        + "intr 1\n"
        for sample in samples
    ]
    monkeypatch.setattr(threads, "_STAT", type("Stat", (), {"read_text": lambda _: remaining.pop(0)})())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(samples[0]))), raising=False)


@pytest.mark.parametrize(
    ("after", "idle"),
    [
        ([(0, 20), (0, 20)], 2), ([(20, 0), (0, 20)], 1), ([(20, 0), (20, 0)], 1), ([(4, 16), (0, 20)], 2),
        ([(10, 10), (10, 10)], 1), ([(0, 20), (0, 20), (20, 0), (1, 19)], 3),
    ],
)  # fmt: skip
def test_idle_processors(monkeypatch, after, idle):
    stat(monkeypatch, [(0, 0)] * len(after), after)
    assert threads.idle_processors(0.0) == idle


def test_all_processors_where_the_system_does_not_say(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "_STAT", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert threads.idle_processors(0.0) == 3


def test_what_the_user_says_goes_first(monkeypatch):
    monkeypatch.setattr(threads, "idle_processors", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.choose_threads() == 7 and threads.choose_threads(2) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert threads.choose_threads() == 3 and threads.choose_threads(2) == 2
    with pytest.raises(CommandError, match="threads must be at least 1, not 0"):
        threads.choose_threads(0)


def test_torch_gets_the_number():
    script = (
        "import sys; from nearflash.support.threads import set_threads\n"
        "set_threads(1); assert 'torch' not in sys.modules\n"
        "import torch; print(torch.get_num_threads()); set_threads(2); print(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1", "2"]


def test_the_callers_mode_comes_back():
    torch = pytest.importorskip("torch")
    tiny = torch.tensor([1e-40])
    torch.set_flush_denormal(True)
    try:
        flushed = (tiny * 1).item()
        with threads.ieee_arithmetic():
            assert (tiny * 1).item() > 0
        assert (tiny * 1).item() == flushed == 0
    finally:
        torch.set_flush_denormal(False)
    assert (tiny * 1).item() > 0


def test_the_mode_comes_back_after_an_error():
    torch = pytest.importorskip("torch")
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(ZeroDivisionError), threads.ieee_arithmetic():
            _ = 1 / 0
        assert (torch.tensor([1e-40]) * 1).item() == 0
    finally:
        torch.set_flush_denormal(False)


def test_map_all_gives_results_in_order_or_the_first_error_when_all_have_ended():
    ended = []

    def call(number):
        time.sleep(0.01 * number)
        ended.append(number)
        if number % 2:
            raise ValueError(number)
        return number * number

    with ThreadPoolExecutor(2) as pool:
        assert threads.map_all(pool, call, (4, 0, 2)) == [16, 0, 4]
        ended.clear()
        with pytest.raises(ValueError, match="1"):
            threads.map_all(pool, call, (0, 1, 3, 4))
    assert sorted(ended) == [0, 1, 3, 4]


def test_map_all_waits_for_what_it_began_where_its_items_end_with_an_error():
    ended = []

    def items():
        yield 0.05
        raise ValueError("no more")

    def call(seconds):
        time.sleep(seconds)
        ended.append(seconds)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="no more"):
            threads.map_all(pool, call, items())
        assert ended == [0.05]
