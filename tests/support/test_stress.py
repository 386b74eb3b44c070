"""Loads ahead, writes behind and a pipeline under random delays, errors, drops, and closes from another thread.

Every run must end within seconds. One that does not is an error that names its seed and where each thread stands.
"""

import gc
import random
import sys
import threading
import time
import traceback
import weakref

import pytest

from nearflash.abi.errors import CommandError
from nearflash.support.buffers import BufferPool
from nearflash.support.prefetch import Prefetcher
from nearflash.support.queues import WorkQueue
from nearflash.support.write_behind import WriteBehind

LIMIT_S = 20
KEYS = 40


class InjectedError(Exception):
    """An error of a random place."""


class Buffer:
    """Memory that knows how many there are, and that one thread alone has it."""

    alive = 0

    def __init__(self):
        Buffer.alive += 1
        weakref.finalize(self, Buffer._gone)
        self.key, self.user = None, threading.Lock()

    @classmethod
    def _gone(cls):
        cls.alive -= 1

    def __enter__(self):
        assert self.user.acquire(blocking=False), "two threads had one buffer"
        return self

    def __exit__(self, *_):
        self.user.release()


class Course:
    """What goes wrong in a run, and when, by its seed."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self.buffers, self.threads = self._random.randint(1, 5), self._random.randint(1, 3)
        self.error_rate = self._random.choice([0, 0, 0.02])
        self.closes_after_s = self._random.choice([None, None, self._random.random() * 0.02])
        self.drops = self._random.choice([0, 0.1])

    def chance(self, share):
        return self._random.random() < share

    def step(self):
        """Take a while, or fail."""
        time.sleep(self._random.choice([0, 0, 0, 0.0001, 0.001]))
        if self.chance(self.error_rate):
            raise InjectedError

    @property
    def is_smooth(self):
        return not self.error_rate and self.closes_after_s is None


class Mover:
    """Loads ahead of its user into a pool, writes behind it out of the pool."""

    def __init__(self, course):
        self.course, self.stored = course, []
        self.pool = BufferPool("stress", (Buffer() for _ in range(course.buffers)))
        self.loads = Prefetcher("stress-load", self.load, threads=course.threads, limit=course.buffers, pool=self.pool)
        self.stores = WriteBehind(2, "stress-store")

    def load(self, key):
        with self.pool.fill() as buffer, buffer:
            buffer.key = None
            self.course.step()
            buffer.key = key
        return buffer

    def store(self, key, buffer):
        try:
            with buffer:
                self.course.step()
                assert buffer.key == key
                self.stored.append(key)
        except BaseException as error:
            self.pool.close(error)
            raise
        finally:
            self.pool.release(buffer)

    def use(self, key):
        buffer = self.loads.take(key)
        try:
            with buffer:
                self.course.step()
                assert buffer.key == key, "another load came into it"
                assert Buffer.alive <= self.course.buffers
                assert sum(not job.done() for job in self.stores._pending) <= 2
        except BaseException:
            self.pool.release(buffer)
            raise
        self.stores.submit(self.store, key, buffer)

    def run(self):
        for key in range(KEYS):
            if self.course.chance(self.course.drops):
                self.loads.drop()
            for ahead in range(key, key + self.course.buffers):
                self.loads.begin(ahead)
            try:
                self.use(key)
            except InjectedError as error:
                assert traceback.extract_tb(error.__traceback__)[-1].name == "step", "its own traceback"
                if self.pool._error is not None:
                    raise
        self.stores.wait()

    def close(self):
        self.loads.close()
        self.stores.close()


@pytest.fixture(autouse=True)
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 60))])
def test_loads_ahead_and_writes_behind(seed, run_within):
    course, movers = Course(seed), []

    def run():
        mover = Mover(course)
        movers.append(mover)
        closer = threading.Timer(course.closes_after_s or 0, mover.close)
        if course.closes_after_s is not None:
            closer.start()
        try:
            mover.run()
        except (InjectedError, CommandError):
            assert not course.is_smooth
        else:
            assert mover.stored == list(range(KEYS)) or not course.is_smooth
        finally:
            mover.close()
            mover.close()
            if course.closes_after_s is not None:
                closer.join()
        return mover.stored

    stored = run_within(LIMIT_S, f"seed {seed}", run, lambda: movers[0].pool.abort())
    movers.clear()
    assert stored == sorted(stored), "in order"
    assert not [each for each in threading.enumerate() if each.name.startswith("stress")]
    if not course.is_smooth:
        gc.collect()  # an error's traceback holds frames, and these the buffers
    assert Buffer.alive == 0, "all memory is given back"


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 30))])
def test_a_pipeline_over_few_buffers(seed, run_within):
    """As a training step has it: threads read into free buffers, one updates, threads write."""
    course, written, errors = Course(seed), [], []
    items = WorkQueue(range(KEYS), producers=1)
    free = BufferPool("stress", range(course.buffers), newest_first=course.chance(0.5))
    ready, done = WorkQueue(producers=course.threads), WorkQueue(producers=1)

    def abort(error=None):
        errors.append(error)
        for queue in (items, free, ready, done):
            queue.abort()

    def stage(source, act, sink):
        try:
            while (item := source.get()) is not None:
                if (result := act(item)) is not None:
                    sink.put(result)
        except InjectedError as error:
            abort(error)
        finally:
            if sink is not free:
                sink.end()

    def read(item):
        buffer = free.get()
        course.step()
        return None if buffer is None else (buffer, item)

    def update(pair):
        course.step()
        return pair

    def write(pair):
        course.step()
        written.append(pair[1])
        return pair[0]

    stages = [(items, read, ready)] * course.threads + [(ready, update, done)] + [(done, write, free)] * course.threads
    threads = [threading.Thread(target=stage, args=each, daemon=True) for each in stages]

    def run():
        for each in threads:
            each.start()
        if course.closes_after_s is not None:
            time.sleep(course.closes_after_s)
            abort()
        items.end()
        for each in threads:
            each.join()

    run_within(LIMIT_S, f"seed {seed}", run, abort)
    assert len(written) == len(set(written))
    if course.is_smooth:
        assert sorted(written) == list(range(KEYS)) and not errors
        assert sorted(free.acquire() for _ in range(course.buffers)) == list(range(course.buffers))


def test_a_hang_is_reported_with_where_it_stands(run_within):
    pool = BufferPool("stress", ["a"])
    pool.acquire()
    with pytest.raises(TimeoutError, match=r"(?s)a wait must end within 0.2 s.*in acquire"):
        run_within(0.2, "a wait", pool.acquire, pool.close)
