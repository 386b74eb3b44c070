"""Blocks of coded weights, packed by the loops of coded_pack.cpp. Format: nearflash.abi.coded."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.coded import CodedHeader
from nearflash.support.native import find_address, load_library

__all__ = ["BlockPacker", "count_exponents", "load_packing_loops"]

_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_EXPONENTS = 256
_SLACK = 64
"""Behind a block's fields, that the loops may read and write."""


class _Coding(ctypes.Structure):
    """`Coding` of coded_pack.cpp."""

    _fields_ = (*((name, _I64) for name in ("has_bitmap", "code_bits", "is_fp16")), ("ranks", _ADDRESS))


class _Scratch(ctypes.Structure):
    """`Scratch` of coded_pack.cpp."""

    _fields_ = tuple((name, _ADDRESS) for name in ("values", "ranks", "deeper"))


@cache
def load_packing_loops() -> ctypes.CDLL:
    """The functions of coded_pack.cpp. Raises CompileError, ConfigError."""
    loops = load_library(Path(__file__).with_name("coded_pack.cpp"))
    loops.count_exponents.argtypes = [_ADDRESS, _I64, ctypes.c_bool, _ADDRESS]
    loops.pack_block.argtypes = [_ADDRESS, _I64, *(_ADDRESS,) * 3]
    loops.count_exponents.restype = loops.pack_block.restype = _I64
    return loops


def count_exponents(words: NDArray[Any], element: ElementFormat) -> tuple[NDArray[np.int64], int]:
    """How often each exponent comes among patterns, contiguous: (256,); and how many patterns are 0."""
    counts = np.empty(_EXPONENTS, np.int64)
    is_fp16 = element is ElementFormat.FP16
    zeros = load_packing_loops().count_exponents(find_address(words), words.size, is_fp16, find_address(counts))
    return counts, int(zeros)


class BlockPacker:
    """Packs blocks of a stream one after another, in memory that it keeps."""

    def __init__(self, header: CodedHeader) -> None:
        size = header.block_elements + _SLACK
        self._values, self._ranks = np.empty(size, np.uint16), np.empty((2, size), np.uint8)
        self._header = header
        self._scratch = _Scratch(
            find_address(self._values), find_address(self._ranks), find_address(self._ranks) + size
        )

    def block_bytes(self, elements: int) -> int:
        """Bytes that a block of so many elements has at most."""
        bits = sum(self._header.sections.values())
        return elements * bits // 8 + 2 * _SLACK * len(self._header.sections)

    def pack(self, words: NDArray[Any], ranks: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        """Write the sections of a block of patterns, contiguous, to `out`; returns their bytes.

        ranks: (256,), the place of each exponent in the codebook; its length for those without.
        """
        header = self._header
        is_fp16 = header.element is ElementFormat.FP16
        coding = _Coding(header.has_bitmap, header.code_bits, is_fp16, find_address(ranks))
        how = ctypes.byref(coding), ctypes.byref(self._scratch)
        return int(load_packing_loops().pack_block(find_address(words), words.size, *how, find_address(out)))
