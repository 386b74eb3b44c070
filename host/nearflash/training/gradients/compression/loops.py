"""Compiled passes over fp32 numbers in host memory, for gradients that come from there: torch's bits."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.support.native import find_address, load_library

__all__ = ["add_residual", "find_large", "pack_residual"]

F32 = NDArray[np.float32]


def add_residual(nibbles: NDArray[np.uint8], scales: NDArray[np.int16], numbers: F32) -> F32:
    """Numbers (n,) plus what nibbles (n / 2,) and scales (n / 16,) are (residual.py); all are contiguous."""
    total = np.empty_like(numbers)
    places = [find_address(array) for array in (nibbles, scales, numbers)]
    _load().add_residual(*places, numbers.size, find_address(total))
    return total


def pack_residual(numbers: F32) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """Nibbles (n / 2,) and scales (n / 16,) of finite numbers (n,), contiguous."""
    nibbles, scales = np.empty(numbers.size // 2, np.uint8), np.empty(numbers.size // 16, np.int16)
    _load().pack_residual(find_address(numbers), numbers.size, find_address(nibbles), find_address(scales))
    return nibbles, scales


def find_large(magnitudes: NDArray[np.int32], least: int) -> NDArray[np.int64]:
    """Ascending places of those of the bit patterns (n,), contiguous, that are at least `least` (1 or more) without
    their signs.
    """
    # Pages of it that nothing is written to are none of the machine's memory.
    places = np.empty(magnitudes.size, np.int64)
    count = _load().find_large(find_address(magnitudes), magnitudes.size, least, find_address(places))
    return places[:count].copy()


@cache
def _load() -> ctypes.CDLL:
    loops = load_library(Path(__file__).with_name("loops.cpp"))
    address, whole = ctypes.c_void_p, ctypes.c_int64
    loops.add_residual.argtypes, loops.add_residual.restype = [address, address, address, whole, address], None
    loops.pack_residual.argtypes, loops.pack_residual.restype = [address, whole, address, address], None
    loops.find_large.argtypes, loops.find_large.restype = [address, whole, ctypes.c_int32, address], whole
    return loops
