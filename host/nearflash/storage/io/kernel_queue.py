"""Requests that the kernel has in flight for one caller, and its older queue for them: io_submit.

Source: io_submit(2), io_getevents(2), linux/aio_abi.h.
"""

import ctypes
import errno
import os
import platform
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError

__all__ = ["AioQueue", "KernelQueue", "Memory", "system_call"]

Memory = NDArray[np.uint8]
_libc = ctypes.CDLL(None, use_errno=True)
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents, io_submit."""
_REQUEST = np.dtype([
    ("data", "<u8"), ("key", "<u4"), ("flags", "<u4"), ("code", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
    ("memory", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("more", "<u4"), ("event_fd", "<u4"),
])  # fmt: skip
"""struct iocb."""
_CODES = {"read": 0, "write": 1}
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])
"""struct io_event."""


def system_call(number: int, *arguments: object) -> int:
    """The result of a system call, made again where a signal interrupted it. Raises OSError."""
    while True:
        result = int(_libc.syscall(ctypes.c_long(number), *arguments))
        if result >= 0:
            return result
        if (error := ctypes.get_errno()) != errno.EINTR:
            raise OSError(error, os.strerror(error))


class KernelQueue(ABC):
    """At most `depth` requests in flight, of one thread at a time.

    The memory of requests stays where it is until each has returned: `close` waits for those in flight.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, depth: int, registered: Sequence[Memory] = ()) -> None:
        """registered: memory that the kernel may keep ready. Raises StateError where there is no such queue."""

    @abstractmethod
    def prepare(self, call: str, fd: int, memory: Memory, offsets: NDArray[np.int64]) -> NDArray[Any]:
        """One request for each row of `memory` (p, bytes) at its offset (p,); call: read or write."""

    @abstractmethod
    def exchange(self, requests: NDArray[Any], least: int) -> tuple[int, NDArray[np.uint64], NDArray[np.int64]]:
        """Hand requests over, wait until `least` of all in flight have returned.

        Returns how many were taken; of those that returned which row each is, and its bytes or its negative errno.
        Raises OSError where requests are refused; those in flight remain there.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight, and give the queue back."""


class AioQueue(KernelQueue):
    """The queue of io_submit: Linux 2.6 and later. Registered memory is read and written as any other."""

    name = "io_submit"

    def __init__(self, depth: int, registered: Sequence[Memory] = ()) -> None:
        if platform.system() != "Linux" or platform.machine() not in _CALLS:
            raise StateError(f"a queue of requests needs Linux on {' or '.join(_CALLS)}, not {platform.platform()}")
        self._depth = depth
        setup, destroy, self._wait, self._submit = _CALLS[platform.machine()]
        self._context = ctypes.c_ulong(0)
        try:
            system_call(setup, ctypes.c_long(depth), ctypes.byref(self._context))
        except OSError as error:
            raise StateError(
                f"a queue of {depth} requests cannot be had ({error.strerror}): see fs.aio-max-nr"
            ) from error
        self._events = np.zeros(depth, _EVENT)
        # It waits for requests in flight. A fork's child has no such context: the kernel refuses it there.
        self._destroy = weakref.finalize(self, _libc.syscall, ctypes.c_long(destroy), self._context)

    def prepare(self, call: str, fd: int, memory: Memory, offsets: NDArray[np.int64]) -> NDArray[Any]:
        """See KernelQueue.prepare."""
        count = len(offsets)
        requests = np.zeros(count, _REQUEST)
        requests["code"], requests["fd"], requests["data"] = _CODES[call], fd, np.arange(count)
        requests["size"], requests["offset"] = memory.shape[1], offsets
        requests["memory"] = memory.ctypes.data + np.arange(count) * memory.strides[0]
        return requests

    def exchange(self, requests: NDArray[Any], least: int) -> tuple[int, NDArray[np.uint64], NDArray[np.int64]]:
        """See KernelQueue.exchange. A request that the kernel refuses at once is an OSError, not a result."""
        taken = 0
        while taken < len(requests):
            addresses = requests.ctypes.data + np.arange(taken, len(requests), dtype=np.uint64) * _REQUEST.itemsize
            count, pointers = ctypes.c_long(len(addresses)), ctypes.c_void_p(addresses.ctypes.data)
            taken += system_call(self._submit, self._context, count, pointers)
        got = system_call(self._wait, self._context, ctypes.c_long(least), ctypes.c_long(self._depth),
                          ctypes.c_void_p(self._events.ctypes.data), None)  # fmt: skip
        return taken, self._events["data"][:got].copy(), self._events["result"][:got].copy()

    def close(self) -> None:
        """See KernelQueue.close."""
        self._destroy()
