"""A bounded set of buffers that threads take turns with.

Threads that work ahead of a caller or behind it wait in one of four classes, so that closing these ends every wait:

    BufferPool    whose turn a buffer is    buffers of layers' weights and of the KV cache, slots of a training step
    Prefetcher    loads ahead, by key       layers' weights, KV cache, experts, tensors of a weights map
    WriteBehind   calls behind, in order    K and V of a call, the KV cache of a visit, pages on their way to flash
    WorkQueue     between stages            reads, updates and writes of a training step
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from nearflash.abi.errors import CommandError
from nearflash.support.queues import WorkQueue

__all__ = ["BufferPool"]

B = TypeVar("B")


class BufferPool(WorkQueue[B]):
    """The buffers of an iterable, and no more than these. Any thread may call; each buffer is one thread's at a time.

    name: of what they are for, in errors. newest_first: what was released last is acquired first, as it is still in
    the processor's cache.
    """

    def __init__(self, name: str, buffers: Iterable[B], *, newest_first: bool = False) -> None:
        super().__init__(buffers, newest_first=newest_first)
        self.size = len(self._items)
        """How many there are."""
        self._name = name
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def acquire(self, prefer: Callable[[B], bool] | None = None) -> B:
        """A free buffer, one of those preferred where there are some. Waits for it.

        Raises the error that the pool was closed with, CommandError where it was closed without.
        """
        buffer = self.get(prefer)
        if buffer is None:
            if self._error is None:
                raise CommandError(f"{self._name} must be open, not closed")
            raise self._error.with_traceback(self._traceback)
        return buffer

    def release(self, buffer: B) -> None:
        """The buffer is free again; forgotten where the pool is closed. Raises ValueError for one too many."""
        with self._lock:
            if len(self._items) >= self.size:
                raise ValueError(f"a buffer of {self._name} must be released once, not again")
            self.put(buffer)

    @contextmanager
    def fill(self) -> Iterator[B]:
        """Acquire a buffer for a block that fills it; where the block raises, it is released."""
        buffer = self.acquire()
        try:
            yield buffer
        except BaseException:
            self.release(buffer)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Forget the buffers; whoever waits for one, or asks later, gets the first error given. May be called twice."""
        with self._lock:
            if self._error is None and error is not None:
                self._error, self._traceback = error, error.__traceback__
            self.abort()
