"""Blocks of rANS-coded bytes, found, expanded and packed by the loops of rans.cpp. Format: nearflash.abi.rans.

A table has a line a block: where it and its group begin, its elements, and its words.
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.rans import LANES, VALUES, RansHeader
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.vector.rows import FoundParts
from nearflash.support.native import find_address, load_library

__all__ = ["TABLE_COLUMNS", "count_bytes", "expand_blocks", "find_rans_groups", "load_rans_loops", "pack_block"]

Bytes = NDArray[np.uint8]
TABLE_COLUMNS = 4
_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class _RansGroups(ctypes.Structure):
    """`Groups` of rans.cpp."""

    _fields_ = (
        ("stream", _ADDRESS),
        *((name, _I64) for name in ("at", "end", "first", "last", "elements", "block_elements", "group_blocks")),
        ("table", _ADDRESS),
    )


@cache
def load_rans_loops() -> ctypes.CDLL:
    """The functions of rans.cpp. Raises CompileError, ConfigError."""
    loops = load_library(Path(__file__).with_name("rans.cpp"))
    loops.find_groups.restype = loops.count_bytes.restype = None
    loops.expand_blocks.argtypes, loops.expand_blocks.restype = [_ADDRESS, _ADDRESS, _I64, _ADDRESS], _I64
    loops.count_bytes.argtypes = [_ADDRESS, _I64, _ADDRESS]
    loops.pack_block.argtypes, loops.pack_block.restype = [_ADDRESS, _I64, *(_ADDRESS,) * 3], _I64
    return loops


def find_rans_groups(
    stream: Bytes, header: RansHeader, at: int, groups: tuple[int, int], table: NDArray[np.int64]
) -> tuple[StreamFault, int, int, int]:
    """Fill the table of blocks of groups from offset `at` on, as vector.coded.find_coded_groups does."""
    sizes = header.elements, header.block_elements, header.group_blocks
    wanted = _RansGroups(find_address(stream), at, stream.size, *groups, *sizes, find_address(table))
    found = FoundParts()
    load_rans_loops().find_groups(ctypes.byref(wanted), ctypes.byref(found))
    return found.unpack()


def expand_blocks(stream: Bytes, table: NDArray[np.int64], out: Bytes) -> int:
    """Write the elements of a table's blocks to `out`, one after another; returns the place in the table of the first
    block whose states do not fit, or the number of blocks."""
    places = find_address(stream), find_address(table), len(table), find_address(out)
    return int(load_rans_loops().expand_blocks(*places))


def count_bytes(values: Bytes) -> NDArray[np.int64]:
    """How often each value of a byte comes in `values`, contiguous: (256,)."""
    counts = np.empty(VALUES, np.int64)
    load_rans_loops().count_bytes(find_address(values), values.size, find_address(counts))
    return counts


def pack_block(values: Bytes, frequencies: NDArray[np.uint16]) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """States (LANES,) and words of a block of values, contiguous, each of which has a frequency (256,) above 0."""
    states, buffer = np.empty(LANES, np.uint32), np.empty(values.size, np.uint16)
    places = find_address(frequencies), find_address(states), find_address(buffer)
    words = int(load_rans_loops().pack_block(find_address(values), values.size, *places))
    return states, buffer[values.size - words :]
