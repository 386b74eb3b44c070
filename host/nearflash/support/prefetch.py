"""Loads ahead of whoever asks, in order, in threads of its own; whoever asks waits for what is not there yet."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Generic, TypeVar

from nearflash.abi.errors import CommandError
from nearflash.support.buffers import BufferPool
from nearflash.support.threads import set_ieee_arithmetic

__all__ = ["Prefetcher"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Prefetcher(Generic[K, V]):
    """Calls `load(key)` in `threads` threads, in the order of `begin`. Any thread may call.

    pool: where values are buffers that `load` acquires and fills; whoever takes one releases it. limit: of keys that
    are begun and not taken. An error of `load` is raised where its key is taken, with the traceback of `load`; other
    keys are not affected. Iterating gives the keys that are begun and not taken, in their order.
    """

    def __init__(
        self, name: str, load: Callable[[K], V], *, threads: int = 1, limit: int | None = None,
        pool: BufferPool[V] | None = None,
    ) -> None:  # fmt: skip
        """name: of the threads."""
        self._name, self._limit, self._pool = name, limit, pool
        self._load: Callable[[K], V] | None = load
        self._ahead: dict[K, Future[V]] = {}
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(threads, name, initializer=set_ieee_arithmetic)

    def begin(self, key: K) -> None:
        """Load it after what was begun before, unless it is begun, or as many are as the limit."""
        with self._lock:
            if key not in self._ahead and (self._limit is None or len(self._ahead) < self._limit):
                self._ahead[key] = self._submit(key)

    def take(self, key: K) -> V:
        """The loaded value; loads it where that was not begun, beyond the limit too. Raises what `load` raised."""
        return self.pop(key).result()

    def pop(self, key: K) -> "Future[V]":
        """As take, without waiting: from here on it is the caller's, and counts no more as begun."""
        with self._lock:
            return self._ahead.pop(key, None) or self._submit(key)

    def cancel(self, key: K) -> bool:
        """Forget a key if its load did not begin; whether it was."""
        with self._lock:
            if key not in self._ahead or not self._ahead[key].cancel():
                return False
            del self._ahead[key]
            return True

    def drop(self, keys: Iterable[K] | None = None) -> None:
        """Forget keys, all that are begun without any, with their errors; release buffers. Waits for loads that run."""
        with self._lock:
            jobs = [self._ahead.pop(key) for key in list(self._ahead if keys is None else keys) if key in self._ahead]
        for job in [job for job in jobs if not job.cancel()]:
            if job.exception() is None and self._pool is not None:
                self._pool.release(job.result())

    @property
    def in_flight(self) -> list[K]:
        """Keys that are begun, and not loaded."""
        with self._lock:
            return [key for key, job in self._ahead.items() if not job.done()]

    def close(self) -> None:
        """Close the pool, drop what is begun, and end the threads when they have loaded what is being taken.

        It may be called twice, and while others wait in `take`.
        """
        with self._lock:
            self._load = None  # nothing is begun any more; nor is whoever gave it held in a circle
        if self._pool is not None:
            self._pool.close()
        self.drop()
        self._threads.shutdown()

    def __iter__(self) -> Iterator[K]:
        with self._lock:
            return iter(tuple(self._ahead))

    def __contains__(self, key: object) -> bool:
        return key in self._ahead

    def _submit(self, key: K) -> "Future[V]":
        if self._load is None:
            raise CommandError(f"{self._name} must be open, not closed")
        return self._threads.submit(self._load, key)
