"""The thread that makes an optimizer's calls: an interrupt comes before a call or after it, never in its middle."""

import gc
import signal
import threading
import time
import weakref

import pytest
import torch

from nearflash.abi.errors import StateError
from nearflash.training.step.worker import Worker


@pytest.fixture
def worker():
    made = Worker("calls")
    yield made
    made.close()


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_results_errors_and_the_mode_of_gradients(worker):
    assert worker(lambda: (threading.current_thread().name, torch.is_grad_enabled())) == ("calls", False)
    with pytest.raises(ZeroDivisionError):
        worker(lambda: 1 // 0)
    assert worker(lambda: 2) == 2


def test_an_interrupt_is_raised_when_the_call_has_ended(worker):
    said, ended = [], []

    def call():
        interrupt()
        time.sleep(0.05)
        interrupt()
        time.sleep(0.05)
        ended.append(1)

    with pytest.raises(KeyboardInterrupt):
        worker(call, interrupted=lambda: said.append(1))
    assert ended == [1] and said == [1]
    assert worker(lambda: 3) == 3


def test_an_interrupt_at_the_very_end(worker):
    """The main thread had taken the lock of the end, and then waited for it."""
    for _ in range(200):
        try:
            worker(interrupt)
        except KeyboardInterrupt:
            continue
    assert worker(lambda: 4) == 4


def test_closed_and_forked(worker, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(StateError, match="in the process that made it"):
        worker(lambda: 1)
    monkeypatch.undo()
    worker.close()
    with pytest.raises(StateError, match="must be open, not closed"):
        worker(lambda: 1)


def test_it_ends_with_the_last_reference():
    threads = threading.active_count()
    worker = Worker("calls")
    thread, gone = worker._thread, weakref.ref(worker)
    worker(lambda: 1)
    del worker
    gc.collect()
    thread.join(10)
    assert gone() is None and threading.active_count() == threads
