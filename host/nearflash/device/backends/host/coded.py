"""Coded weights expanded by the host's cores: what the device `host` of the expand kernel does with them.

Format and faults: nearflash.abi.coded. Equals nearflash.model.weights.levels.
"""

from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES
from nearflash.abi.coded import CodedHeader
from nearflash.device.backends.host.matrix import expand_parts, find_parts
from nearflash.device.backends.host.vector.coded import TABLE_COLUMNS, expand_blocks, find_coded_groups

__all__ = ["expand_coded"]

Bytes = NDArray[np.uint8]
_VALUES = 3
"""Column of a table of blocks."""


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

    parts = find_parts(
        stream, header, partial(find_coded_groups, stream, header), (header.blocks, header.group_blocks, TABLE_COLUMNS),
        2 * header.block_elements * header.group_blocks, "ones behind the last element of block {place}",
    )  # fmt: skip
    return sum(expand_parts(parts, expand, out.nbytes, executor))
