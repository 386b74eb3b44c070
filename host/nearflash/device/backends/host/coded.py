"""Coded weights expanded by the host's cores: what the device `host` of the expand kernel does with them.

Format and faults: nearflash.abi.coded. Equals nearflash.model.weights.levels.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader
from nearflash.abi.coded import CodedHeader
from nearflash.device.backends.host.matrix import expand_parts, find_parts, read_rows
from nearflash.device.backends.host.vector.coded import TABLE_COLUMNS, expand_blocks, find_coded_groups

__all__ = ["expand_coded", "read_blocks", "read_table"]

Bytes = NDArray[np.uint8]
_VALUES = 3
"""Column of a table of blocks."""


def read_blocks(stream: Bytes) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The blocks of coded weights, some groups at a time, each when its lengths and its checksum are right: the first
    one's number, and a table (blocks, TABLE_COLUMNS) of vector.coded.

    Raises StreamError; before that comes what is right before the fault.
    """
    header = CodedHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    sizes, dense_bytes = (header.blocks, header.group_blocks, TABLE_COLUMNS), 2 * header.block_elements
    beyond = "ones behind the last element of block {place}"
    find = partial(find_coded_groups, stream, header)
    return find_parts(stream, header, find, sizes, dense_bytes * header.group_blocks, beyond)


def read_table(stream: Bytes, header: BitmapHeader | CodedHeader) -> NDArray[np.int64]:
    """The lines of all rows of a matrix, or blocks of coded weights, as that is its header. Raises StreamError."""
    parts = read_blocks(stream) if isinstance(header, CodedHeader) else read_rows(stream)
    return np.concatenate([table for _, table in parts])


def expand_coded(stream: Bytes, out: NDArray[Any], executor: Executor | None = None) -> int:
    """Write the elements of coded weights to `out`, uint16 patterns, of as many elements.

    Returns how many have a value.
    Groups are compared with their own checksums; check_groups tells whether they are this stream's. executor: by
    default the caller's thread for few elements, `expand_pool` for others. Raises StreamError; elements before the
    fault may have been written.
    """
    header = CodedHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    assert out.flags.c_contiguous and out.size == header.elements and out.dtype.itemsize == 2
    elements = out.reshape(-1)

    def expand(part: tuple[int, NDArray[np.int64]]) -> int:
        first_block, table = part
        expand_blocks(stream, header, table, elements[first_block * header.block_elements :])
        return int(table[:, _VALUES].sum())

    return sum(expand_parts(read_blocks(stream), expand, out.nbytes, executor))
