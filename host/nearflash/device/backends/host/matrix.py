"""Bitmap matrices on the host, expanded in threads by compiled loops: what the device `host` of the expand kernel does.

Format and faults: nearflash.abi.bitmap. Equals nearflash.model.weights.bitmap.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    GROUP_END,
    HEADER_BYTES,
    SCALE_COLUMNS,
    SECTION_BYTES,
    SECTIONS,
    BitmapHeader,
    Coding,
    Section,
    bitmap_error,
    section_bytes,
)
from nearflash.abi.errors import StreamError
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.vector.rows import find_rows, row_loop
from nearflash.device.threads import ieee_arithmetic, set_ieee_arithmetic

__all__ = ["CallingThread", "RowGroup", "expand_into", "expand_pool", "read_groups"]

Bytes = NDArray[np.uint8]
_THREADED_BYTES = 4 << 20
"""Dense bytes from which on threads are worth their start; fewer are expanded by the caller's."""


@dataclass(frozen=True)
class RowGroup:
    """Rows that share a checksum."""

    first_row: int
    book_at: int
    """Offset of the codebook in the stream, where the matrix is coded."""
    table: NDArray[np.int64]
    """(n, 3), of each row: offset of its bitmap, values, escapes."""


def _nothing(count: int) -> None:
    """Reads nothing: all is there."""


def read_groups(stream: Bytes, fill: Callable[[int], None] = _nothing) -> Iterator[RowGroup]:
    """The groups of a matrix, each when its lengths and its checksum are right.

    fill: called with a number of bytes before those that far are looked at, which may come only then.

    Raises StreamError; before that comes, where rows of its group are right, a group of them alone.
    """
    fill(min(HEADER_BYTES, stream.size))
    header = BitmapHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    sections = SECTIONS[header.row_format]
    bits = np.array([sections.get(section, 0) for section in Section])
    columns = -(-header.columns // SCALE_COLUMNS), header.columns
    longest = header.group_rows * sum(
        section_bytes(columns[section is not Section.SCALES] * each) for section, each in sections.items()
    )
    base, at = stream.ctypes.data, HEADER_BYTES
    for number in range(header.groups):
        begin, first = at, number * header.group_rows
        fill(min(at + longest + 2 * SECTION_BYTES, stream.size))
        if header.coding is Coding.EXPONENTS:
            at += SECTION_BYTES
            if at > stream.size:
                raise _ends_at(begin)
        table = np.empty((min(header.rows - first, header.group_rows), 3), np.int64)
        fault, found, at = find_rows(base, at, stream.size, header.columns, bits, table)
        error = None
        if fault:
            where = f"ones behind column {header.columns - 1} of row {first + found}"
            error = bitmap_error(StreamFault(fault), where if fault == StreamFault.COUNT else f"at byte {at}")
        elif at + SECTION_BYTES > stream.size:
            error = _ends_at(at)
        elif GROUP_END.unpack(stream[at : at + SECTION_BYTES].tobytes()) != (number, _checksum(stream[begin:at])):
            error = bitmap_error(StreamFault.CHECKSUM, f"another one in group {number}")
        yield RowGroup(first, begin, table[:found])
        if error is not None:
            raise error
        at += SECTION_BYTES
    if at != stream.size:
        raise bitmap_error(StreamFault.LENGTH, f"{at} bytes of {stream.size}")


def expand_into(
    stream: Bytes, out: Bytes, executor: Executor | None = None, fill: Callable[[int], None] = _nothing
) -> int:
    """Write the dense rows of a matrix to `out` (rows, bytes of a row), contiguous; returns the number of values.

    Bytes behind a row's columns stay as they are. executor: of threads that have set_ieee_arithmetic; by default the
    caller's thread for a small matrix, `expand_pool` for others. Raises StreamError; rows before the fault may have
    been written. fill: as for `read_groups`.
    """
    fill(min(HEADER_BYTES, stream.size))
    header = BitmapHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    used = header.columns * header.dense.number_format.bytes
    assert out.flags.c_contiguous and len(out) == header.rows and out.shape[1] >= used
    loop = row_loop(header.row_format, header.output)
    base, target, row_bytes = stream.ctypes.data, out.ctypes.data, out.shape[1]

    def expand(group: RowGroup) -> None:
        buffer = np.empty(2 * header.columns + section_bytes(1), np.uint8)
        at = target + group.first_row * row_bytes
        loop(base, group.table, header.columns, at, row_bytes, base + group.book_at, buffer.ctypes.data)

    if executor is None:
        executor = CallingThread() if len(out) * used < _THREADED_BYTES else expand_pool()
    jobs, values = [], 0
    try:
        for group in read_groups(stream, fill):
            jobs.append(executor.submit(expand, group))
            values += int(group.table[:, 1].sum())
    finally:
        for job in jobs:
            job.result()  # the memory is theirs until then
    return values


class CallingThread(Executor):
    """Runs each call at once, in the thread that submits it, in IEEE arithmetic."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """See Executor.submit."""
        done: Future[Any] = Future()
        with ieee_arithmetic():
            done.set_result(call(*arguments, **keywords))
        return done


@cache
def expand_pool() -> ThreadPoolExecutor:
    """Threads that expand, one a processor."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "nearflash-expand", initializer=set_ieee_arithmetic)


def _ends_at(at: int) -> StreamError:
    return bitmap_error(StreamFault.LENGTH, f"at byte {at}")


def _checksum(body: Bytes) -> int:
    from crc32c import crc32c  # not for boards, which check matrices themselves

    return int(crc32c(body))
