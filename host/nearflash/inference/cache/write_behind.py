"""Work that runs behind the caller, in order, a few calls deep."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["WriteBehind"]


class WriteBehind:
    """One thread that runs what is submitted, in order.

    At most `depth` calls wait or run: their operands are held until then, so `submit` blocks while there are as many.
    The first failure is raised by the next `submit` or `wait`, and by every one after it; nothing runs any more.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth!r}")
        self._depth = depth
        self._pending: deque[Future[None]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None

    def submit(self, call: Callable[[], None]) -> None:
        """Run the call after those submitted before it."""
        while len(self._pending) >= self._depth:
            self._pending.popleft().result()
        if self._failure is not None:
            raise self._failure
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "write-behind")
        self._pending.append(self._executor.submit(self._run, call))

    def wait(self) -> None:
        """Until everything submitted has run."""
        while self._pending:
            self._pending.popleft().result()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Drop what has not begun, wait for what has; failures are not raised. It may be used again afterwards."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._pending.clear()
        self._executor = self._failure = None

    def _run(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            call()
        except BaseException as failure:
            self._failure = failure
            raise
