"""Bitmap matrices on the host, expanded in threads by native loops: what the device `host` of the expand kernel does.

Format and faults: nearflash.abi.bitmap. Equals nearflash.model.weights.bitmap.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    HEADER_BYTES,
    BitmapHeader,
    bitmap_error,
)
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.vector.rows import expand_rows, find_groups
from nearflash.support.threads import CallingThread, set_ieee_arithmetic

__all__ = ["Rows", "expand_into", "expand_pool", "read_rows"]

Bytes = NDArray[np.uint8]
_THREADED_BYTES = 4 << 20
"""Dense bytes from which on threads are worth their start; fewer are expanded by the caller's."""
_READ_BYTES = 4 << 20
"""Dense bytes of groups that are found, checked and then expanded at once: what the caches hold of them is used, and
Python's lock, which other threads wait for, is taken but a few times."""
_WHERE = {
    StreamFault.LENGTH: "at byte {at}",
    StreamFault.COUNT: "ones behind column {last} of row {place}",
    StreamFault.CHECKSUM: "another one in group {place}",
}


@dataclass(frozen=True)
class Rows:
    """Rows that follow one another, of one group or more."""

    first_row: int
    table: NDArray[np.int64]
    """(n, 4), of each row: offset of its bitmap, values, escapes, and offset of its group."""


def read_rows(stream: Bytes) -> Iterator[Rows]:
    """The rows of a matrix, some groups at a time, each when its lengths and its checksum are right.

    Raises StreamError; before that comes what is right before the fault, and where rows of its group are, those.
    """
    header = BitmapHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    dense_bytes = header.group_rows * header.columns * header.dense.number_format.bytes
    at, step = HEADER_BYTES, max(_READ_BYTES // dense_bytes, 1)
    for group in range(0, header.groups, step):
        first, last = group * header.group_rows, min(group + step, header.groups)
        table = np.empty((min(last * header.group_rows, header.rows) - first, 4), np.int64)
        fault, place, found, at = find_groups(stream, header, at, (group, last), table)
        yield Rows(first, table[:found])
        if fault:
            raise bitmap_error(fault, _WHERE[fault].format(place=place, at=at, last=header.columns - 1))
    if at != stream.size:
        raise bitmap_error(StreamFault.LENGTH, f"{at} bytes of {stream.size}")


def expand_into(stream: Bytes, out: Bytes, executor: Executor | None = None) -> int:
    """Write the dense rows of a matrix to `out` (rows, bytes of a row), contiguous; returns the number of values.

    Bytes behind a row's columns stay as they are. executor: of threads that have set_ieee_arithmetic; by default the
    caller's thread for a small matrix, `expand_pool` for others. Raises StreamError; rows before the fault may have
    been written.
    """
    header = BitmapHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    used = header.columns * header.dense.number_format.bytes
    assert out.flags.c_contiguous and len(out) == header.rows and out.shape[1] >= used

    def expand(rows: Rows) -> None:
        expand_rows(stream, header, rows.table, out[rows.first_row :])

    if executor is None:
        executor = CallingThread() if len(out) * used < _THREADED_BYTES else expand_pool()
    jobs, values = [], 0
    try:
        for rows in read_rows(stream):
            jobs.append(executor.submit(expand, rows))
            values += int(rows.table[:, 1].sum())
    finally:
        for job in jobs:
            job.result()  # the memory is theirs until then
    return values


@cache
def expand_pool() -> ThreadPoolExecutor:
    """Threads that expand, one a processor."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "nearflash-expand", initializer=set_ieee_arithmetic)
