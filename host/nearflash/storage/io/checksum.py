"""CRC32C of extents, blocks and tables, without Python's lock where they are long.

Long data goes through our own loop, by carry-less products of wide vectors where the processor has them (30 GB/s of
memory, 50 of a cache, against the package's 14 and 28), else by its instruction; short data, and all where no compiler
is, through the package crc32c, but for rows, which one call of our loop sums, short ones too. The lock is kept for
single pages: to have it back takes longer than they do (21 pages of 32 KiB beside other threads: 0.7 ms, and 0.1 with
it kept).

Source: RFC 3720, 12.1 (Castagnoli).
"""

import ctypes
from collections.abc import Sequence
from functools import cache, reduce
from pathlib import Path

import numpy as np
from crc32c import crc32c as _crc32c
from numpy.typing import NDArray

from nearflash.support.native import CompileError, find_address, load_library

__all__ = ["copy_checked", "crc32c", "crc32c_each", "crc32c_rows"]

Bytes = NDArray[np.uint8]
Checksums = NDArray[np.uint32]

_APART_BYTES = 128 << 10
"""From here on without Python's lock."""


def crc32c(data: Bytes, before: int = 0) -> int:
    """CRC32C of contiguous bytes, and of those before them, whose CRC32C is `before`."""
    if data.nbytes < _APART_BYTES:
        return int(_crc32c(data, before, 0))
    loops = _loops()
    if loops is None:
        return int(_crc32c(data, before, 1))
    return int(loops.crc32c(find_address(data), data.nbytes, before))


def crc32c_each(blocks: Sequence[Bytes], before: Checksums) -> Checksums:
    """CRC32C of each block, contiguous bytes, and of the bytes before it, whose CRC32C is in `before` (blocks,).

    Python's lock is given away once, not for each block: beside busy threads to have it back takes up to 5 ms.
    """
    if loops := _loops_for(blocks):
        return _call_for_each(loops, blocks, before, None, None)
    return np.array([crc32c(block, int(value)) for block, value in zip(blocks, before, strict=True)], np.uint32)


def crc32c_rows(parts: Sequence[Bytes], chosen: NDArray[np.int64] | None = None) -> Checksums:
    """CRC32C of each row of `parts` (p, bytes), which stand side by side, (p,); or of the `chosen` rows (n,).

    The bytes of a part's row follow one another. Raises ValueError where they do not.
    """
    if any(part.strides[1] != 1 for part in parts):
        raise ValueError("rows must be contiguous for compiled loops, not strided: copy them")
    count = len(parts[0]) if chosen is None else len(chosen)
    if (loops := _loops()) is None:
        rows = range(count) if chosen is None else chosen
        return np.array([reduce(lambda value, part: crc32c(part[row], value), parts, 0) for row in rows], np.uint32)
    places = np.array([(part.ctypes.data, part.strides[0], part.shape[1]) for part in parts], np.int64)
    values = np.empty(count, np.uint32)
    if count * places[:, 2].sum() < _APART_BYTES:
        loops = _loops(keep_lock=True) or loops
    numbers = None if chosen is None else np.ascontiguousarray(chosen, np.int64)
    loops.crc32c_rows(find_address(places), len(parts), None if numbers is None else find_address(numbers), count,
                      find_address(values))  # fmt: skip
    return values


def copy_checked(
    blocks: Sequence[Bytes], before: Checksums, expected: Checksums, targets: Sequence[Bytes | None]
) -> NDArray[np.bool_]:
    """Whether the CRC32C of each block, as of crc32c_each, is the expected one: then the target, if any, is filled.

    A target has as many bytes as its block.
    """
    if loops := _loops_for(blocks):
        addresses = np.array([0 if target is None else find_address(target) for target in targets], np.int64)
        stated = np.array(expected, np.uint32)
        values = _call_for_each(loops, blocks, before, find_address(stated), find_address(addresses))
        return np.equal(values, stated).view(np.bool_)
    good: NDArray[np.bool_] = np.equal(crc32c_each(blocks, before), expected)
    for block, target, is_good in zip(blocks, targets, good, strict=True):
        if is_good and target is not None:
            target[:] = block
    return good


def _loops_for(blocks: Sequence[Bytes]) -> ctypes.CDLL | None:
    """None where the lock is to be kept: see the module."""
    return _loops() if sum(block.nbytes for block in blocks) >= _APART_BYTES else None


def _call_for_each(
    loops: ctypes.CDLL, blocks: Sequence[Bytes], before: Checksums, expected: int | None, targets: int | None
) -> Checksums:
    addresses = np.array([find_address(block) for block in blocks], np.int64)
    lengths, values = np.array([block.nbytes for block in blocks], np.int64), before.copy()
    loops.crc32c_each(
        find_address(addresses), find_address(lengths), find_address(values), len(blocks), expected, targets
    )
    return values


@cache
def _loops(keep_lock: bool = False) -> ctypes.CDLL | None:
    """The functions of checksum.cpp, or None without a compiler; keep_lock: Python's, while one of them runs."""
    try:
        loops = load_library(Path(__file__).with_suffix(".cpp"))
    except CompileError:
        return None
    if keep_lock:
        loops = ctypes.PyDLL(loops._name)
    for loop in (loops.crc32c, loops.crc32c_by_table):
        loop.argtypes, loop.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32], ctypes.c_uint32
    pointers = [ctypes.c_void_p] * 3
    loops.crc32c_each.argtypes, loops.crc32c_each.restype = [*pointers, ctypes.c_int64, *pointers[:2]], None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    loops.crc32c_rows.argtypes, loops.crc32c_rows.restype = [pointer, size, pointer, size, pointer], None
    return loops
