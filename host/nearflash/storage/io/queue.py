"""Many reads at once through the kernel's own queue: one system call hands them over, one waits for them.

A page of 16 KB costs some 22 us of processor time with a thread, about 12 in this queue. Linux only; the file must be
open for direct I/O, else the kernel reads one after another.

Source: io_submit(2), io_getevents(2), linux/aio_abi.h.
"""

import ctypes
import errno
import os
import platform
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.io.backend import PositionalBackend

__all__ = ["QueueBackend"]

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents, io_submit."""
_REQUEST = np.dtype([
    ("data", "<u8"), ("key", "<u4"), ("flags", "<u4"), ("code", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
    ("memory", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("more", "<u4"), ("event_fd", "<u4"),
])  # fmt: skip
"""struct iocb; code 0 is a read."""
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])
"""struct io_event."""


class QueueBackend(PositionalBackend):
    """Reads of many pages go through a queue of `depth` places, all else one by one; of several callers at once each
    has a queue of its own.

    Raises StateError where there is no such queue.
    """

    queued = True

    def __init__(self, depth: int = 256) -> None:
        if platform.system() != "Linux" or platform.machine() not in _CALLS:
            raise StateError(f"a queue of reads needs Linux on {' or '.join(_CALLS)}, not {platform.platform()}")
        self._depth = depth
        self._setup, self._destroy, self._wait, self._submit = _CALLS[platform.machine()]
        self._libc, self._lock = ctypes.CDLL(None, use_errno=True), threading.Lock()
        self._idle = [self._queue()]
        """Queues that no caller has."""

    def read_many(self, fd: int, memory: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
        """See IoBackend.read_many."""
        with self._lock:
            queue = self._idle.pop() if self._idle else None
        queue = queue or self._queue()
        try:
            return self._read(queue, fd, memory, offsets)
        finally:
            with self._lock:
                self._idle.append(queue)

    def _queue(self) -> ctypes.c_ulong:
        context = ctypes.c_ulong(0)
        try:
            self._call(self._setup, ctypes.c_long(self._depth), ctypes.byref(context))
        except OSError as error:
            raise StateError(
                f"a queue of {self._depth} reads cannot be had ({error.strerror}): see fs.aio-max-nr"
            ) from error
        weakref.finalize(self, self._libc.syscall, ctypes.c_long(self._destroy), context)
        return context

    def _read(self, queue: ctypes.c_ulong, fd: int, memory: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
        count = len(offsets)
        requests, events = np.zeros(count, _REQUEST), np.zeros(self._depth, _EVENT)
        requests["fd"], requests["size"], requests["offset"] = fd, memory.shape[1], offsets
        requests["memory"] = memory.ctypes.data + np.arange(count) * memory.strides[0]
        addresses = (requests.ctypes.data + np.arange(count) * _REQUEST.itemsize).astype(np.uint64)
        asked = done = moved = failure = 0
        while asked < count or done < asked:
            if asked < count and asked - done < self._depth:
                pointers = ctypes.c_void_p(addresses.ctypes.data + 8 * asked)
                count_free = ctypes.c_long(min(count - asked, self._depth - (asked - done)))
                try:
                    asked += self._call(self._submit, queue, count_free, pointers)
                except OSError as error:
                    failure, count = error.errno or errno.EIO, asked  # requests in flight write to memory: wait for it
                    continue
            least = asked - done if asked == count else (asked - done + 1) // 2
            got = self._call(self._wait, queue, ctypes.c_long(least), ctypes.c_long(self._depth),
                             ctypes.c_void_p(events.ctypes.data), None)  # fmt: skip
            results, done = events["result"][:got], done + got
            if (worst := int(results.min())) < 0:
                failure, count = -worst, asked
            moved += int(results.clip(0).sum())
        if failure:
            raise OSError(failure, os.strerror(failure))
        return moved

    def _call(self, number: int, *arguments: object) -> int:
        """A system call, again where a signal interrupted it. Raises OSError."""
        while True:
            result = int(self._libc.syscall(ctypes.c_long(number), *arguments))
            if result >= 0:
                return result
            if (error := ctypes.get_errno()) != errno.EINTR:
                raise OSError(error, os.strerror(error))
