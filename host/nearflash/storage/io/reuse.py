"""Aligned memory for reads that is used again when it is free, so that it has its pages from the system already.

The kernel reads into memory that was never touched at less than half the rate (a virtual drive, 64 KiB x 48: 1.0 of
2.4 GB/s): every 4 KiB of it is a page fault first.
"""

import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.io.direct import aligned_buffer

__all__ = ["reused_buffer"]

_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 24
"""Smaller and larger ones are not kept."""
_KEPT_BYTES = 32 << 20
"""Free memory that is kept of each size, a power of two."""
_free: dict[int, "deque[NDArray[np.uint8]]"] = {
    size: deque(maxlen=_KEPT_BYTES // size)
    for size in (1 << log2 for log2 in range(_LEAST_BYTES.bit_length() - 1, _MOST_BYTES.bit_length()))
}


def reused_buffer(size_bytes: int) -> NDArray[np.uint8]:
    """Aligned bytes with any content. They are used again when no array refers to them any more."""
    room = max(1 << max(size_bytes - 1, 0).bit_length(), _LEAST_BYTES)
    if room > _MOST_BYTES:
        return aligned_buffer(size_bytes)
    try:
        memory = _free[room].pop()  # a deque takes and gives in one piece, also where a collection comes between
    except IndexError:
        memory = aligned_buffer(room)
    # Views of an array refer to what its memory belongs to: behind a memoryview they refer to this array, not further.
    array: NDArray[np.uint8] = np.frombuffer(memoryview(memory.data), np.uint8)
    weakref.finalize(array, _free[room].append, memory).atexit = False
    return array[:size_bytes]
