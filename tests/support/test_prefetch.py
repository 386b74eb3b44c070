"""Keys are loaded in their order, ahead of who takes them; errors, drops and closing concern the right ones."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearflash.abi.errors import CommandError
from nearflash.support.buffers import BufferPool
from nearflash.support.prefetch import Prefetcher


class Loads:
    """Loads that note their keys and go on when they may."""

    def __init__(self):
        self.keys, self.may = [], threading.Event()

    def __call__(self, key):
        self.keys.append(key)
        assert self.may.wait(10), "a load must be let go on"
        if key < 0:
            raise ZeroDivisionError(key)
        return key * key

    def begun(self, count):
        deadline = time.monotonic() + 10
        while len(self.keys) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        return list(self.keys)


@pytest.fixture
def loads():
    made = Loads()
    yield made
    made.may.set()


def test_keys_are_loaded_in_order_and_once(loads):
    loads.may.set()
    ahead = Prefetcher("tests", loads)
    for key in (3, 1, 3, 2):
        ahead.begin(key)
    assert list(ahead) == [3, 1, 2] and 1 in ahead and 4 not in ahead
    assert [ahead.take(key) for key in (1, 2, 3)] == [1, 4, 9]
    assert loads.keys == [3, 1, 2] and not list(ahead)
    assert ahead.take(5) == 25, "that was not begun"
    ahead.close()


def test_no_more_than_the_limit_are_begun_but_what_is_taken_always_is(loads):
    loads.may.set()
    ahead = Prefetcher("tests", loads, limit=2)
    for key in range(5):
        ahead.begin(key)
    assert list(ahead) == [0, 1] and ahead.take(4) == 16
    ahead.close()
    assert loads.keys == [0, 1, 4]


def test_as_many_at_once_as_there_are_threads(loads):
    ahead = Prefetcher("tests", loads, threads=3)
    for key in range(5):
        ahead.begin(key)
    assert sorted(loads.begun(3)) == [0, 1, 2]
    loads.may.set()
    ahead.close()


def test_an_error_is_raised_where_its_key_is_taken_with_its_own_traceback(loads):
    loads.may.set()
    ahead = Prefetcher("tests", loads)
    ahead.begin(-1)
    ahead.begin(2)
    assert ahead.take(2) == 4
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            ahead.take(-1)
        assert caught.traceback[-1].name == "__call__"
    assert loads.keys == [-1, 2, -1], "asked for again, it is loaded again"
    ahead.close()


def test_what_is_dropped_is_not_loaded_and_its_buffers_are_free(loads):
    pool = BufferPool("tests", range(3))

    def fill(key):
        with pool.fill() as buffer:
            loads(key)
        return buffer

    ahead = Prefetcher("tests", fill, pool=pool)
    for key in (1, 2, 3):
        ahead.begin(key)
    loads.begun(1)
    with ThreadPoolExecutor(1) as other:
        dropping = other.submit(ahead.drop)
        time.sleep(0.02)
        assert not dropping.done(), "it waits for the load that runs"
        loads.may.set()
        dropping.result(10)
    assert loads.keys == [1] and not list(ahead)
    ahead.begin(-1)
    ahead.drop()
    assert sorted(pool.acquire() for _ in range(3)) == [0, 1, 2]
    ahead.close()


def test_some_are_cancelled_or_dropped_and_the_others_stay(loads):
    ahead = Prefetcher("tests", loads)
    for key in (1, 2, 3, 4):
        ahead.begin(key)
    loads.begun(1)
    assert not ahead.cancel(1), "it runs"
    assert ahead.cancel(2) and not ahead.cancel(2) and not ahead.cancel(9)
    ahead.drop([3, 7])
    assert ahead.in_flight == list(ahead) == [1, 4]
    loads.may.set()
    assert ahead.take(4) == 16 and list(ahead) == [1] and not ahead.in_flight
    ahead.drop([1])
    assert ahead.take(1) == 1 and loads.keys == [1, 4, 1], "what was dropped is loaded again"
    ahead.close()


def test_closing_ends_a_load_that_waits_for_a_buffer_and_a_caller_that_waits_for_the_load(run_within):
    pool = BufferPool("tests", ["a"])

    def fill(key):
        with pool.fill() as buffer:
            return buffer

    ahead = Prefetcher("tests-closed", fill, pool=pool)
    assert ahead.take(0) == "a"
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(ahead.take, 1)
        ahead.begin(2)
        run_within(10, "closing", ahead.close, pool.close)
        ahead.close()
        with pytest.raises(CommandError, match="tests must be open, not closed"):
            waiting.result(10)
    for call in (ahead.begin, ahead.take):
        with pytest.raises(CommandError, match="tests-closed must be open, not closed"):
            call(3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tests-closed")]


def test_what_is_being_taken_when_it_is_closed_is_loaded(loads):
    ahead = Prefetcher("tests", loads)
    for key in (1, 2, 3):
        ahead.begin(key)
    taken = ahead.pop(2)
    loads.begun(1)
    with ThreadPoolExecutor(1) as other:
        closing = other.submit(ahead.close)
        loads.may.set()
        closing.result(10)
    assert taken.result(10) == 4 and loads.keys == [1, 2]


def test_it_holds_nobody_when_it_is_closed():
    class Loader:
        def __init__(self):
            self.ahead = Prefetcher("tests", self.load)

        def load(self, key):
            return key

    loader = Loader()
    loader.ahead.take(1)
    gone = weakref.ref(loader)
    loader.ahead.close()
    gc.disable()
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()
