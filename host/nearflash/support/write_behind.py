"""Work that runs behind the caller, in order, a few calls deep."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from types import TracebackType
from typing import ParamSpec

from nearflash.support.threads import set_ieee_arithmetic

__all__ = ["WriteBehind"]

P = ParamSpec("P")


class WriteBehind:
    """One thread that runs what is submitted, in order. Calls come from one thread, `close` from any.

    At most `depth` calls wait or run: their operands are held until then, so `submit` blocks while there are as many.
    The first failure is raised by the next `submit` or `wait`, and by every one after it; nothing runs any more.
    """

    def __init__(self, depth: int, name: str = "write-behind") -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth!r}")
        self._depth, self._name = depth, name
        self._pending: deque[Future[None]] = deque()
        self._lock = Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._failure: tuple[BaseException, TracebackType | None] | None = None

    def submit(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> "Future[None]":
        """Run the call after those submitted before it. Its own future is for whoever depends on this call alone."""
        self._wait_for(self._depth - 1)
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, self._name, initializer=set_ieee_arithmetic)
            self._pending.append(self._executor.submit(self._run, partial(call, *args, **kwargs)))
            return self._pending[-1]

    def wait(self) -> None:
        """Until everything submitted has run."""
        self._wait_for(0)

    def close(self) -> None:
        """Drop what has not begun, wait for what has; failures are not raised. It may be used again afterwards."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(cancel_futures=True)
            self._pending.clear()
            self._executor = self._failure = None

    def _wait_for(self, most: int) -> None:
        """Until at most so many calls wait or run. Raises the first failure, each time with its own traceback alone."""
        while len(self._pending) > most:
            with suppress(IndexError, CancelledError):  # closed by another thread meanwhile
                self._pending.popleft().exception()
        if self._failure is not None:
            raise self._failure[0].with_traceback(self._failure[1])

    def _run(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure[0]
        try:
            call()
        except BaseException as failure:
            self._failure = failure, failure.__traceback__
            raise
