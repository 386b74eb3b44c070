"""A transfer of several blocks that is under way in other threads: polled, waited for, or stopped.

Whoever gives a transfer memory may use it for something else once the transfer has ended. A transfer that takes too
long is stopped: afterwards nothing reads or writes that memory any more, whatever the drive still does, so that no
other block's bytes get into it, or are stored from it under a wrong key.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["BlockTransfer"]


class BlockTransfer:
    """A transfer of `count` blocks; any thread may call."""

    def __init__(self, count: int) -> None:
        self.start_s, self.end_s = time.monotonic(), 0.0
        """time.monotonic() of its beginning, and of its end once it is there."""
        self.size_bytes = 0
        """Of the blocks that succeeded."""
        self._results: list[bool | None] = [None] * count
        self._left, self._users, self._stopped = count, 0, False
        self._changed = threading.Condition()
        self._end_if_settled()

    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._left <= 0

    def result(self, timeout_s: float | None = None) -> list[bool]:
        """Wait for the end; whether each block succeeded: a put is durable, a get has filled its memory.

        Raises TimeoutError; the transfer goes on then.
        """
        with self._changed:
            if not self._changed.wait_for(self.is_done, timeout_s):
                raise TimeoutError(f"a transfer must end within {timeout_s} s; {self._left} blocks are left: stop it")
            return [bool(result) for result in self._results]

    def is_stopped(self) -> bool:
        """Whether `stop` was called: its memory may be something else's."""
        with self._changed:
            return self._stopped

    def stop(self) -> None:
        """End it now: blocks that are left count as failed. Waits for memory that is being copied at the moment."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._users)
            self._left = 0
            self._end_if_settled()

    def settle(self, block: int, succeeded: bool, size_bytes: int = 0) -> None:
        """A block has ended; once more, or after `stop`, it is ignored."""
        with self._changed:
            if self._results[block] is None and not self._stopped:
                self._results[block] = succeeded
                self.size_bytes += size_bytes if succeeded else 0
                self._left -= 1
                self._end_if_settled()

    @contextmanager
    def using_memory(self) -> Iterator[bool]:
        """Whether the caller's memory may be used within the block: not after `stop`, which waits for the block."""
        with self._changed:
            allowed = not self._stopped
            self._users += allowed
        try:
            yield allowed
        finally:
            with self._changed:
                self._users -= allowed
                self._changed.notify_all()

    def _end_if_settled(self) -> None:
        with self._changed:
            if self.is_done():
                self.end_s = self.end_s or time.monotonic()
                self._changed.notify_all()
