"""Aligned memory that is used again: new pages cost a fault each, some 1 ms for 4 MiB."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.io.direct import aligned_buffer

__all__ = ["BufferPool"]


class BufferPool:
    """Page-aligned buffers by length, each used by one at a time. Any thread may take one; all stay until the end."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._lock = threading.Lock()

    @contextmanager
    def take(self, size_bytes: int) -> Iterator[NDArray[np.uint8]]:
        """A buffer of that length, with any content, for the time of the `with` block."""
        with self._lock:
            free = self._free[size_bytes]
            memory = free.pop() if free else aligned_buffer(size_bytes)
        try:
            yield memory
        finally:
            with self._lock:
                free.append(memory)
