"""Calls run in order behind their caller, a few deep; the first failure stays."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearflash.support.write_behind import WriteBehind


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


def test_closing_ends_a_wait_for_what_it_drops(run_within):
    behind, done = WriteBehind(3), []
    for _ in range(20):
        gate, started = threading.Event(), threading.Event()
        behind.submit(lambda gate=gate, started=started: started.set() or gate.wait(10))
        dropped = behind.submit(done.append, 1)
        started.wait(10)
        with ThreadPoolExecutor(2) as others:
            ends = [others.submit(behind.wait), others.submit(behind.close)]
            while not dropped.cancelled():
                gate.wait(0.001)
            gate.set()
            run_within(10, "waiting and closing", lambda ends=ends: [each.result() for each in ends])
    assert not done


def test_a_call_s_own_future_and_the_failure_s_own_traceback():
    behind = WriteBehind(2)
    assert behind.submit(lambda: None).result(10) is None

    def fail(*, why):
        raise OSError(why)

    assert str(behind.submit(fail, why="no").exception(10)) == "no"
    lengths = set()
    for _ in range(3):
        with pytest.raises(OSError, match="no") as caught:
            behind.wait()
        assert caught.traceback[-1].name == "fail"
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1
    behind.close()


def test_depth_is_checked():
    with pytest.raises(ValueError, match="depth must be at least 0, not -1"):
        WriteBehind(-1)


def test_without_depth_the_caller_runs_it():
    behind, done = WriteBehind(0), []
    behind.submit(done.append, threading.get_ident())
    assert done == [threading.get_ident()]
    behind.wait()
    behind.wait_for_oldest()

    def fail():
        raise OSError("no")

    for call in (lambda: behind.submit(fail), lambda: behind.submit(done.append, 1), behind.wait, behind.check):
        with pytest.raises(OSError, match="no"):
            call()
        assert behind.was_raised
    behind.close()
    behind.submit(done.append, 2)
    assert done[1:] == [2]


def test_the_oldest_is_waited_for_and_whether_a_failure_was_raised_is_known():
    behind, gates, done = WriteBehind(3), [threading.Event() for _ in range(2)], []
    for gate in gates:
        behind.submit(lambda gate=gate: gate.wait(10) and done.append(gate))
    gates[0].set()
    behind.wait_for_oldest()
    assert done == gates[:1]
    gates[1].set()
    behind.wait()
    assert behind.submit(lambda: 1 // 0).exception(10) and not behind.was_raised
    with pytest.raises(ZeroDivisionError):
        behind.wait_for_oldest()
    assert behind.was_raised
    behind.close()
