"""The kernel's newer queue: requests are handed over in memory that it shares, and read or write registered memory.

One io_uring_enter hands over and waits. Completions are posted by the thread that waits (IORING_SETUP_COOP_TASKRUN),
not by interrupting it; SINGLE_ISSUER with DEFER_TASKRUN, which ties a queue to one thread, took a fifth to a third more
processor time at 4 requests in flight (Linux 6.18, a virtual drive). Linux 5.19 and later, on x86_64 alone: its stores
become visible in their order, on which what is written here relies.

Source: io_uring_setup(2), io_uring_enter(2), io_uring_register(2), linux/io_uring.h.
"""

import ctypes
import mmap
import os
import platform
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.io.kernel_queue import KernelQueue, Memory, system_call

__all__ = ["UringQueue"]

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_SUBMIT_ALL, _COOP_TASKRUN = 1 << 7, 1 << 8
_SINGLE_MMAP = 1 << 0
"""A feature: both rings are in one mapping (Linux 5.4)."""
_GETEVENTS = 1
_REGISTER_BUFFERS = 0
_REQUESTS_AT = 0x10000000
"""Where a mapping of the queue's file has its requests (IORING_OFF_SQES)."""
_REGISTERED_BYTES = 1 << 30
"""Most that one registered buffer may have."""
_SHARED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_CODES = {"read": 22, "write": 23}
_REGISTERED_CODES = {"read": 4, "write": 5}
_REQUEST = np.dtype([
    ("code", "u1"), ("flags", "u1"), ("priority", "<u2"), ("fd", "<i4"), ("offset", "<i8"), ("memory", "<u8"),
    ("size", "<u4"), ("more", "<u4"), ("data", "<u8"), ("buffer", "<u2"), ("personality", "<u2"), ("file", "<u4"),
    ("reserved", "<u8", 2),
])  # fmt: skip
"""struct io_uring_sqe."""
_RESULT = np.dtype([("data", "<u8"), ("result", "<i4"), ("flags", "<u4")])
"""struct io_uring_cqe."""


class UringQueue(KernelQueue):
    """The queue of io_uring. Memory that cannot be registered (`ulimit -l`) is read and written as any other."""

    name = "io_uring"

    def __init__(self, depth: int, registered: Sequence[Memory] = ()) -> None:
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            raise StateError(f"io_uring needs Linux on x86_64, not {platform.platform()}: io_submit does the same")
        parameters = np.zeros(30, "<u4")  # struct io_uring_params
        parameters[2] = _SUBMIT_ALL | _COOP_TASKRUN
        try:
            self._fd = system_call(_SETUP, ctypes.c_uint(depth), ctypes.c_void_p(parameters.ctypes.data))
        except OSError as error:
            raise StateError(
                f"io_uring with {depth} requests cannot be had ({error.strerror}): it needs Linux 5.19, "
                "kernel.io_uring_disabled=0, and in a container its calls allowed; io_submit does the same"
            ) from error
        # In a fork's child, too, which must not share the queue: the kernel keeps it as long as a descriptor is open.
        self._release = weakref.finalize(self, os.close, self._fd)
        self._map(parameters)
        self._registered = self._register(registered)

    def _map(self, parameters: NDArray[np.uint32]) -> None:
        requests, results = (int(count) for count in parameters[:2])
        assert parameters[5] & _SINGLE_MMAP
        asked, returned = (parameters[at : at + 10].tolist() for at in (10, 20))
        size = max(asked[6] + 4 * requests, returned[5] + _RESULT.itemsize * results)
        ring = np.frombuffer(mmap.mmap(self._fd, size, _SHARED), np.uint8)
        table = mmap.mmap(self._fd, _REQUEST.itemsize * requests, _SHARED, offset=_REQUESTS_AT)
        self._requests = np.frombuffer(table, _REQUEST)
        self._results = ring[returned[5] : returned[5] + _RESULT.itemsize * results].view(_RESULT)
        self._asked_head, self._asked_tail, self._returned_head, self._returned_tail = (
            ring[at : at + 4].view("<u4") for at in (*asked[:2], *returned[:2])
        )
        places = ring[asked[6] : asked[6] + 4 * requests].view("<u4")
        places[:] = np.arange(requests)  # a request for each place, in the same order

    def _register(self, registered: Sequence[Memory]) -> list[tuple[int, int]]:
        """First and last address of each registered buffer; none where the kernel refuses them."""
        spans = np.array([(memory.ctypes.data, memory.nbytes) for memory in registered], "<u8").reshape(-1, 2)
        pointer = ctypes.c_void_p(spans.ctypes.data)
        try:
            if len(spans):
                system_call(_REGISTER, ctypes.c_uint(self._fd), ctypes.c_uint(_REGISTER_BUFFERS), pointer,
                            ctypes.c_uint(len(spans)))  # fmt: skip
        except OSError:
            return []
        self._kept = tuple(registered)  # what the kernel reads to and writes from must not be another's meanwhile
        return [(first, first + size) for first, size in spans.tolist()]

    @property
    def registered(self) -> int:
        """How many buffers the kernel keeps ready."""
        return len(self._registered)

    def prepare(self, call: str, fd: int, memory: Memory, offsets: NDArray[np.int64]) -> NDArray[Any]:
        """See KernelQueue.prepare."""
        count, first = len(offsets), memory.ctypes.data
        end = first + (count - 1) * memory.strides[0] + memory.shape[1]
        buffer = next((at for at, (low, high) in enumerate(self._registered) if low <= first and end <= high), None)
        requests = np.zeros(count, _REQUEST)
        requests["code"] = (_CODES if buffer is None else _REGISTERED_CODES)[call]
        requests["buffer"], requests["fd"], requests["data"] = buffer or 0, fd, np.arange(count)
        requests["size"], requests["offset"] = memory.shape[1], offsets
        requests["memory"] = first + np.arange(count) * memory.strides[0]
        return requests

    def exchange(self, requests: NDArray[Any], least: int) -> tuple[int, NDArray[np.uint64], NDArray[np.int64]]:
        """See KernelQueue.exchange."""
        count, head = len(requests), int(self._asked_head[0])
        self._requests[(head + np.arange(count)) % len(self._requests)] = requests
        self._asked_tail[0] = (head + count) % (1 << 32)  # the kernel looks at it in the call alone
        taken = self._enter(count, least)
        head, tail = int(self._returned_head[0]), int(self._returned_tail[0])
        got = (tail - head) % (1 << 32)
        results = self._results[(head + np.arange(got)) % len(self._results)]
        self._returned_head[0] = tail
        return taken, results["data"], results["result"].astype(np.int64)

    def close(self) -> None:
        """See KernelQueue.close."""
        # Both count since the start; what an interrupted caller was told of them does not matter.
        while in_flight := (int(self._asked_head[0]) - int(self._returned_tail[0])) % (1 << 32):
            self._returned_head[0] = self._returned_tail[0]
            self._enter(0, in_flight)
        self._release()

    def _enter(self, count: int, least: int) -> int:
        return system_call(_ENTER, ctypes.c_uint(self._fd), ctypes.c_uint(count), ctypes.c_uint(least),
                           ctypes.c_uint(_GETEVENTS), None, ctypes.c_size_t(0))  # fmt: skip
