"""Rows of a bitmap matrix, found and expanded by the loops of bitmap.cpp. Format: nearflash.abi.bitmap.

A table has a line a row: the offset of its bitmap, its values, its escapes, and the offset of its group, where the
codebook is.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import SECTION_BYTES, SECTIONS, BitmapHeader, Coding, ElementFormat, Section
from nearflash.abi.topk import StreamFault
from nearflash.support.native import find_address, load_library

__all__ = ["TABLE_COLUMNS", "FoundParts", "expand_codes", "expand_rows", "find_groups", "load_bitmap_loops"]

Bytes = NDArray[np.uint8]
Table = NDArray[np.int64]
TABLE_COLUMNS = 4
_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class _Groups(ctypes.Structure):
    """`Groups` of bitmap.cpp."""

    _fields_ = (
        ("stream", _ADDRESS),
        *((name, _I64) for name in ("at", "end", "first", "last", "rows", "columns", "group_rows", "book_bytes")),
        ("section_bits", _I64 * len(Section)),
        ("table", _ADDRESS),
    )


class FoundParts(ctypes.Structure):
    """`Found` of sections.hpp."""

    _fields_ = tuple((name, _I64) for name in ("fault", "place", "parts", "at"))

    def unpack(self) -> tuple[StreamFault, int, int, int]:
        """See find_groups."""
        return StreamFault(self.fault), self.place, self.parts, self.at


class _Expansion(ctypes.Structure):
    """`Expansion` of bitmap.cpp."""

    _fields_ = (
        ("stream", _ADDRESS),
        ("table", _ADDRESS),
        ("rows", _I64),
        ("columns", _I64),
        ("out", _ADDRESS),
        ("row_bytes", _I64),
        ("buffer", _ADDRESS),
    )


class _Codes(ctypes.Structure):
    """`Codes` of bitmap.cpp."""

    _fields_ = (
        ("pairs", _ADDRESS),
        ("codes", _ADDRESS),
        ("rows", _I64),
        ("columns", _I64),
        ("bits", _I64),
        ("out", _ADDRESS),
    )


@cache
def load_bitmap_loops() -> ctypes.CDLL:
    """The functions of bitmap.cpp. Raises CompileError, ConfigError."""
    loops = load_library(Path(__file__).with_name("bitmap.cpp"))
    loops.find_groups.restype = loops.expand_rows.restype = loops.expand_codes.restype = None
    return loops


def find_groups(
    stream: Bytes, header: BitmapHeader, at: int, groups: tuple[int, int], table: Table
) -> tuple[StreamFault, int, int, int]:
    """Fill the table of rows of groups (the first, and behind the last) from offset `at` on; check their checksums.

    Returns the StreamFault; the number of its row, or of its group where it is in no row; rows found; and where it is,
    else where the groups end.
    """
    sections, book_bytes = SECTIONS[header.row_format], SECTION_BYTES if header.coding is Coding.EXPONENTS else 0
    bits = (_I64 * len(Section))(*(sections.get(section, 0) for section in Section))
    layout = header.rows, header.columns, header.group_rows, book_bytes
    wanted = _Groups(find_address(stream), at, stream.size, *groups, *layout, bits, find_address(table))
    found = FoundParts()
    load_bitmap_loops().find_groups(ctypes.byref(wanted), ctypes.byref(found))
    return found.unpack()


def expand_rows(stream: Bytes, header: BitmapHeader, table: Table, out: Bytes) -> None:
    """Write the dense rows of a table to `out` (rows, bytes), of which the bytes of the columns are written."""
    buffer = np.empty(2 * header.columns + SECTION_BYTES, np.uint8)
    rows = _Expansion(
        find_address(stream), find_address(table), len(table), header.columns, find_address(out), out.shape[1],
        find_address(buffer),
    )  # fmt: skip
    is_fp16 = header.output is ElementFormat.FP16
    load_bitmap_loops().expand_rows(ctypes.byref(rows), int(header.row_format), is_fp16)


def expand_codes(pairs: Bytes, codes: Bytes, bits: int, output: ElementFormat, out: NDArray[Any]) -> None:
    """Write the dense rows `out` (rows, columns), uint16, of codes of 8 or 4 bits of every element.

    pairs: the rows' scales and minima; codes: a row's padded to whole bytes, and 64 bytes more behind the last.
    """
    matrix = _Codes(find_address(pairs), find_address(codes), *out.shape, bits, find_address(out))
    load_bitmap_loops().expand_codes(ctypes.byref(matrix), output is ElementFormat.FP16)
