import threading
import time

import pytest

from nearflash.inference.cache.write_behind import WriteBehind


def test_calls_run_in_order_behind_the_caller():
    behind, gate, done = WriteBehind(2), threading.Event(), []
    behind.submit(lambda: gate.wait(10) and done.append(0))
    behind.submit(lambda: done.append(1))
    assert done == []
    gate.set()
    behind.wait()
    assert done == [0, 1]
    behind.close()


def test_submit_blocks_while_as_many_wait_as_the_depth():
    behind, gate = WriteBehind(2), threading.Event()
    for _ in range(2):
        behind.submit(lambda: gate.wait(10))
    late = threading.Thread(target=behind.submit, args=(lambda: None,))
    late.start()
    late.join(0.05)
    assert late.is_alive()
    gate.set()
    late.join(10)
    assert not late.is_alive()
    behind.wait()
    behind.close()


def test_a_failure_stays_and_nothing_runs_behind_it():
    behind, done = WriteBehind(4), []
    gate = threading.Event()

    def fail():
        gate.wait(10)
        raise OSError("no")

    behind.submit(fail)
    behind.submit(lambda: done.append(1))
    gate.set()
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            behind.wait()
    with pytest.raises(OSError, match="no"):
        behind.submit(lambda: done.append(2))
    assert not done
    behind.close()
    behind.submit(lambda: done.append(3))
    behind.wait()
    assert done == [3]
    behind.close()


def test_close_drops_what_has_not_begun():
    behind, done, started = WriteBehind(2), [], threading.Event()

    def slow():
        started.set()
        time.sleep(0.05)
        done.append(0)

    behind.submit(slow)
    behind.submit(lambda: done.append(1))
    started.wait(10)
    behind.close()
    assert done == [0]


def test_depth_is_checked():
    with pytest.raises(ValueError, match="depth must be at least 1, not 0"):
        WriteBehind(0)
