"""Bitmap matrices on the host, expanded in threads by native loops: what the device `host` of the expand kernel does.

Format and faults: nearflash.abi.bitmap. Equals nearflash.model.weights.bitmap. `find_parts` and `expand_parts` serve
other streams of groups, too.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader, GroupedHeader, bitmap_error
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.vector.rows import TABLE_COLUMNS, expand_rows, find_groups
from nearflash.support.threads import CallingThread, set_ieee_arithmetic

__all__ = ["expand_into", "expand_parts", "expand_pool", "find_parts", "read_rows"]

Bytes = NDArray[np.uint8]
T = TypeVar("T")
_THREADED_BYTES = 4 << 20
"""Dense bytes from which on threads are worth their start; fewer are expanded by the caller's."""
_READ_BYTES = 4 << 20
"""Dense bytes of groups that are found, checked and then expanded at once: what the caches hold of them is used, and
Python's lock, which other threads wait for, is taken but a few times."""
_WHERE = {
    StreamFault.LENGTH: "at byte {at}",
    StreamFault.CHECKSUM: "another one in group {place}",
}


def read_rows(stream: Bytes) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The rows of a matrix, some groups at a time, each when its lengths and its checksum are right: the first one's
    number, and a table (rows, TABLE_COLUMNS) of vector.rows.

    Raises StreamError; before that comes what is right before the fault, and where rows of its group are, those.
    """
    header = BitmapHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    dense_bytes = header.group_rows * header.columns * header.dense.number_format.bytes
    beyond = f"ones behind column {header.columns - 1} of row {{place}}"
    sizes = header.rows, header.group_rows, TABLE_COLUMNS
    return find_parts(stream, header, partial(find_groups, stream, header), sizes, dense_bytes, beyond)


def find_parts(
    stream: Bytes, header: GroupedHeader, find: Callable[..., tuple[StreamFault, int, int, int]],
    parts: tuple[int, int, int], dense_bytes: int, beyond: str,
) -> Iterator[tuple[int, NDArray[np.int64]]]:  # fmt: skip
    """Tables of the parts of a stream's groups, rows or blocks, some groups at a time, each when its lengths and its
    checksum are right; with the number of its first part.

    find: fills a table of groups from an offset on (rows.find_groups). parts: how many there are, of a group, and
    columns of a table. dense_bytes: of a group. beyond: what a COUNT is, by its {place}. Raises StreamError, as
    `read_rows`.
    """
    total, of_group, columns = parts
    at, step = HEADER_BYTES, max(_READ_BYTES // dense_bytes, 1)
    for group in range(0, header.groups, step):
        first, last = group * of_group, min(group + step, header.groups)
        table = np.empty((min(last * of_group, total) - first, columns), np.int64)
        fault, place, found, at = find(at, (group, last), table)
        yield first, table[:found]
        if fault:
            detail = {StreamFault.COUNT: beyond, **_WHERE}[fault].format(place=place, at=at)
            raise bitmap_error(fault, detail, header.what)
    if at != stream.size:
        raise bitmap_error(StreamFault.LENGTH, f"{at} bytes of {stream.size}", header.what)


def expand_into(stream: Bytes, out: Bytes, executor: Executor | None = None) -> int:
    """Write the dense rows of a matrix to `out` (rows, bytes of a row), contiguous; returns the number of values.

    Bytes behind a row's columns stay as they are. executor: of threads that have set_ieee_arithmetic; by default the
    caller's thread for a small matrix, `expand_pool` for others. Raises StreamError; rows before the fault may have
    been written.
    """
    header = BitmapHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    used = header.columns * header.dense.number_format.bytes
    assert out.flags.c_contiguous and len(out) == header.rows and out.shape[1] >= used

    def expand(rows: tuple[int, NDArray[np.int64]]) -> int:
        first_row, table = rows
        expand_rows(stream, header, table, out[first_row:])
        return int(table[:, 1].sum())

    return sum(expand_parts(read_rows(stream), expand, len(out) * used, executor))


def expand_parts(
    parts: Iterable[T], expand: Callable[[T], int], dense_bytes: int, executor: Executor | None
) -> list[int]:
    """Results of `expand` of each part, in threads; those that were begun have ended when the iterator raises.

    executor: None: the caller's thread for few dense bytes, `expand_pool` for others.
    """
    if executor is None:
        executor = CallingThread() if dense_bytes < _THREADED_BYTES else expand_pool()
    jobs: list[Future[int]] = []
    try:
        for part in parts:
            jobs.append(executor.submit(expand, part))
    finally:
        found = [job.result() for job in jobs]  # the memory is theirs until then
    return found


@cache
def expand_pool() -> ThreadPoolExecutor:
    """Threads that expand, one a processor."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "nearflash-expand", initializer=set_ieee_arithmetic)
