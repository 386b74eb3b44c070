"""Blocks of coded weights, found and expanded by the loops of coded.cpp. Format: nearflash.abi.coded.

A table has a line a block: where it and its group begin, its elements, its values, and those of each further level.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.coded import CodedHeader
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.vector.rows import FoundParts
from nearflash.support.native import find_address, load_library

__all__ = ["TABLE_COLUMNS", "expand_blocks", "find_coded_groups", "load_coded_loops"]

Bytes = NDArray[np.uint8]
Table = NDArray[np.int64]
TABLE_COLUMNS = 8
_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_SLACK = 64
"""Values behind a block's that the loops may write."""


class _CodedLayout(ctypes.Structure):
    """`Layout` of coded.cpp."""

    _fields_ = tuple((name, _I64) for name in
                     ("elements", "block_elements", "group_blocks", "has_bitmap", "code_bits", "is_fp16"))  # fmt: skip


class _CodedGroups(ctypes.Structure):
    """`Groups` of coded.cpp."""

    _fields_ = (
        ("stream", _ADDRESS),
        *((name, _I64) for name in ("at", "end", "first", "last")),
        ("layout", _CodedLayout),
        ("table", _ADDRESS),
    )


class _BlockExpansion(ctypes.Structure):
    """`Expansion` of coded.cpp."""

    _fields_ = (
        ("stream", _ADDRESS),
        ("table", _ADDRESS),
        ("blocks", _I64),
        ("layout", _CodedLayout),
        ("out", _ADDRESS),
        ("buffer", _ADDRESS),
    )


@cache
def load_coded_loops() -> ctypes.CDLL:
    """The functions of coded.cpp. Raises CompileError, ConfigError."""
    loops = load_library(Path(__file__).with_name("coded.cpp"))
    loops.find_groups.restype = loops.expand_blocks.restype = None
    return loops


def find_coded_groups(
    stream: Bytes, header: CodedHeader, at: int, groups: tuple[int, int], table: Table
) -> tuple[StreamFault, int, int, int]:
    """Fill the table of blocks of groups (the first, and behind the last) from offset `at` on; check their checksums.

    Returns the StreamFault; the number of its block, or of its group where it is in no block; blocks found; and where
    it is, else where the groups end.
    """
    wanted = _CodedGroups(find_address(stream), at, stream.size, *groups, _layout(header), find_address(table))
    found = FoundParts()
    load_coded_loops().find_groups(ctypes.byref(wanted), ctypes.byref(found))
    return found.unpack()


def expand_blocks(stream: Bytes, header: CodedHeader, table: Table, out: NDArray[Any]) -> None:
    """Write the elements of a table's blocks to `out`, uint16, one after another."""
    buffer = np.empty(header.block_elements + _SLACK if header.has_bitmap else 0, np.uint16)
    blocks = _BlockExpansion(
        find_address(stream), find_address(table), len(table), _layout(header), find_address(out), find_address(buffer)
    )
    load_coded_loops().expand_blocks(ctypes.byref(blocks))


def _layout(header: CodedHeader) -> _CodedLayout:
    sizes = header.elements, header.block_elements, header.group_blocks
    return _CodedLayout(*sizes, header.has_bitmap, header.code_bits, header.element is ElementFormat.FP16)
