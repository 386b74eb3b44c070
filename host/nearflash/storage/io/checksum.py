"""CRC32C of extents, blocks and tables, without Python's lock where they are long.

Long data goes through our own loop, by carry-less products of wide vectors where the processor has them (30 GB/s of
memory, 50 of a cache, against the package's 14 and 28), else by its instruction; short data, and all where no compiler
is, through the package crc32c. The lock is kept for single pages: to have it back takes longer than they do (21 pages
of 32 KiB beside other threads: 0.7 ms, and 0.1 with it kept).

Source: RFC 3720, 12.1 (Castagnoli).
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from crc32c import crc32c as _crc32c
from numpy.typing import NDArray

from nearflash.support.native import CompileError, find_address, load_library

__all__ = ["crc32c"]

_APART_BYTES = 128 << 10
"""From here on without Python's lock."""


def crc32c(data: NDArray[np.uint8], before: int = 0) -> int:
    """CRC32C of contiguous bytes, and of those before them, whose CRC32C is `before`."""
    if data.nbytes < _APART_BYTES:
        return int(_crc32c(data, before, 0))
    loops = _loops()
    if loops is None:
        return int(_crc32c(data, before, 1))
    return int(loops.crc32c(find_address(data), data.nbytes, before))


@cache
def _loops() -> ctypes.CDLL | None:
    """The functions of checksum.cpp, or None without a compiler."""
    try:
        loops = load_library(Path(__file__).with_suffix(".cpp"))
    except CompileError:
        return None
    for loop in (loops.crc32c, loops.crc32c_by_table):
        loop.argtypes, loop.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32], ctypes.c_uint32
    return loops
