"""A queue between threads that can end, and that measures how long it was waited for."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["WorkQueue"]

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Items in order, or the newest first, without bound; it ends when each of its `producers` has called `end`."""

    def __init__(self, items: Iterable[T] = (), producers: int = 1, *, newest_first: bool = False) -> None:
        self.waited_s = 0.0
        """Summed over the consumers, since the start or `measure`."""
        self._items, self._producers = deque(items), producers
        self._add = self._items.appendleft if newest_first else self._items.append
        # `with` takes this lock, not the condition: an interrupt between two instructions of Condition.__enter__, which
        # is written in Python, would leave the lock taken.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._measured_from = 0.0
        self._aborted = False

    def put(self, item: T) -> None:
        """Add an item; an aborted queue drops it."""
        with self._lock:
            if not self._aborted:
                self._add(item)
                self._condition.notify()

    def get(self, prefer: Callable[[T], bool] | None = None) -> T | None:
        """The first item, or the first of those preferred when there are some; None when the queue has ended."""
        with self._lock:
            start = time.perf_counter()
            self._condition.wait_for(lambda: self._items or self._producers <= 0)
            self.waited_s += max(0.0, time.perf_counter() - max(start, self._measured_from))
            if not self._items:
                return None
            place = next((i for i, item in enumerate(self._items) if prefer and prefer(item)), 0)
            item = self._items[place]
            del self._items[place]
            return item

    @property
    def is_empty(self) -> bool:
        """Whether an item would be waited for."""
        return not self._items

    def end(self) -> None:
        """One producer has no more items."""
        with self._lock:
            self._producers -= 1
            self._condition.notify_all()

    def abort(self) -> None:
        """Forget the items and end."""
        with self._lock:
            self._items.clear()
            self._producers, self._aborted = 0, True
            self._condition.notify_all()

    def measure(self) -> None:
        """Waiting counts from now on."""
        with self._lock:
            self.waited_s, self._measured_from = 0.0, time.perf_counter()
