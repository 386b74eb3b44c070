"""Work that runs behind the caller, in order, a few calls deep."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import RLock
from types import TracebackType
from typing import ParamSpec

from nearflash.support.threads import CallingThread, set_ieee_arithmetic

__all__ = ["WriteBehind"]

P = ParamSpec("P")


class WriteBehind:
    """One thread that runs what is submitted, in order. Calls come from one thread, `close` from any.

    At most `depth` calls wait or run: their operands are held until then, so `submit` blocks while there are as many.
    With a depth of 0 it runs them itself. The first failure is raised by the next call, and by every one after it;
    nothing runs any more.
    """

    def __init__(self, depth: int, name: str = "write-behind") -> None:
        if depth < 0:
            raise ValueError(f"depth must be at least 0, not {depth!r}")
        self._depth, self._name = depth, name
        self._pending: deque[Future[None]] = deque()
        self._lock = RLock()
        self._executor: Executor | None = None
        self._failure: tuple[BaseException, TracebackType | None] | None = None
        self.was_raised = False
        """Whether the caller has the failure."""

    def submit(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> "Future[None]":
        """Run the call after those submitted before it. Its own future is for whoever depends on this call alone."""
        self._wait_for(self._depth - 1)
        with self._lock:
            if self._executor is None:
                thread = partial(ThreadPoolExecutor, 1, self._name, initializer=set_ieee_arithmetic)
                self._executor = thread() if self._depth else CallingThread()
            self._pending.append(self._executor.submit(self._run, partial(call, *args, **kwargs)))
            return self._pending[-1]

    def wait(self) -> None:
        """Until everything submitted has run."""
        self._wait_for(0)

    def wait_for_oldest(self) -> None:
        """Until the call has run that was submitted before the others."""
        self._wait_for(len(self._pending) - 1)

    def check(self) -> None:
        """Raise the first failure if there is one, each time with its own traceback alone."""
        if self._failure is not None:
            self.was_raised = True
            raise self._failure[0].with_traceback(self._failure[1])

    def close(self) -> None:
        """Drop what has not begun, wait for what has; failures are not raised. It may be used again afterwards."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(cancel_futures=True)
            self._pending.clear()
            self._executor = self._failure = None
            self.was_raised = False

    def _wait_for(self, most: int) -> None:
        """Until at most so many calls wait or run."""
        while self._pending and len(self._pending) > most:
            with suppress(IndexError, CancelledError):  # closed by another thread meanwhile
                self._pending.popleft().exception()
        self.check()

    def _run(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure[0]
        try:
            call()
        except BaseException as failure:
            self._failure = failure, failure.__traceback__
            self.was_raised = not self._depth  # as the caller is here
            raise
