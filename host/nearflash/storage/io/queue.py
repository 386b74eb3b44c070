"""Many reads or writes at once through one of the kernel's own queues.

A page of 16 KB costs some 22 us of processor time with a thread, about 12 in a queue. Linux only; the file must be open
for direct I/O, else the kernel moves one after another.
"""

import errno
import os
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.io.backend import PositionalBackend
from nearflash.storage.io.kernel_queue import AioQueue, KernelQueue, Memory
from nearflash.storage.io.uring import UringQueue

__all__ = ["QUEUES", "QueueBackend", "usable_queues"]

QUEUES: dict[str, type[KernelQueue]] = {queue.name: queue for queue in (AioQueue, UringQueue)}
_AGAIN = (-errno.EAGAIN, -errno.EINTR)
"""Results of requests that another attempt may move."""


def usable_queues() -> dict[str, str]:
    """The kernel's queues by name, each with why it cannot be had here; empty where it can."""
    usable = {}
    for name, queue in QUEUES.items():
        try:
            queue(1).close()
            usable[name] = ""
        except StateError as error:
            usable[name] = str(error)
    return usable


class QueueBackend(PositionalBackend):
    """Many rows go through a queue of `depth` places, all else one by one; of several callers at once each has a queue
    of its own. Nothing is in flight any more when a call returns or raises. A fork's child makes its own queues.

    queue: a name of QUEUES. Raises StateError where the kernel has no such queue.
    """

    queued = True

    def __init__(self, depth: int = 256, queue: str = AioQueue.name) -> None:
        self.depth, self.queue = depth, queue
        self._registered: tuple[Memory, ...] = ()
        self._forget()
        self._idle.append(self._open())
        _backends.add(self)

    def register(self, memory: Memory) -> None:
        """See IoBackend.register."""
        with self._lock:
            self._registered = (*self._registered, memory)
            self._idle.clear()  # a queue takes its memory when it is opened

    def read_many(self, fd: int, memory: Memory, offsets: NDArray[np.int64]) -> int:
        """See IoBackend.read_many."""
        return self._move("read", fd, memory, offsets)

    def write_many(self, fd: int, memory: Memory, offsets: NDArray[np.int64]) -> int:
        """See IoBackend.write_many."""
        return self._move("write", fd, memory, offsets)

    def _open(self) -> KernelQueue:
        return QUEUES[self.queue](self.depth, self._registered)

    def _forget(self) -> None:
        """In the child of a fork: queues are the parent's."""
        self._lock = threading.Lock()
        self._idle: list[KernelQueue] = []
        """Queues that no caller has."""

    def _move(self, call: str, fd: int, memory: Memory, offsets: NDArray[np.int64]) -> int:
        with self._lock:
            registered, queue = self._registered, self._idle.pop() if self._idle else None
        queue = queue or self._open()
        try:
            results = self._exchange(queue, call, fd, memory, offsets)
        except BaseException:
            queue.close()  # requests in flight have their memory until they return
            raise
        with self._lock:
            if registered is self._registered:
                self._idle.append(queue)
        size_bytes = memory.shape[1]
        if (moved := int(results.sum())) == results.size * size_bytes:
            return moved
        # What was cut short is moved again: at the end of the file, on a full disk, or after a signal.
        again = self.read if call == "read" else self.write
        cut = np.flatnonzero(results < size_bytes)
        return moved + sum(again(fd, memory[row].data, int(offsets[row])) - int(results[row]) for row in cut)

    def _exchange(
        self, queue: KernelQueue, call: str, fd: int, memory: Memory, offsets: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Bytes moved of each row. Raises OSError, with requests in flight."""
        requests, results = queue.prepare(call, fd, memory, offsets), np.zeros(len(offsets), np.int64)
        asked = done = 0
        while done < len(results):
            free = min(len(results) - asked, self.depth - (asked - done))
            in_flight = asked - done + free
            # Half of them, so that the other half keeps the drive at work while more are handed over.
            least = in_flight if asked + free == len(results) else (in_flight + 1) // 2
            taken, rows, moved = queue.exchange(requests[asked : asked + free], least)
            asked, done = asked + taken, done + len(rows)
            if len(moved) and moved.min() < 0:
                moved[np.isin(moved, _AGAIN)] = 0
                if (worst := int(moved.min())) < 0:
                    raise OSError(-worst, os.strerror(-worst))
            results[rows] = moved
        return results


def _forget_in_child() -> None:
    for backend in list(_backends):
        backend._forget()


_backends: "weakref.WeakSet[QueueBackend]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
