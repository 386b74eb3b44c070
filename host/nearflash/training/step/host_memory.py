"""Loops over tensors that lie in host memory, by their addresses: one call for many, without Python's lock.

torch's own loops would take a team of OpenMP threads for each of the step's threads, more than there are processors.
Addresses and lengths are int64; what lies there must be checked before (`is_plain`), and kept alive.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.storage.state.fingerprint import KEYS, RUN
from nearflash.support.native import find_address, load_library

__all__ = [
    "KEYS",
    "RUN",
    "WORD_BYTES",
    "Row",
    "copy_all",
    "divide_copies",
    "is_plain",
    "load_tensor_loops",
    "sums_of",
    "widen_bf16",
]

WORD_BYTES = 4
_ALIGNED = 64
"""Bytes, of which a thread's part of copies is a multiple."""
Row = tuple[int, int, int, int]
"""Address of words, address of their target or 0, their number, and the place of the first in its tensor."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers follow one another in host memory, as they are; not of one without any memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
    )


@cache
def load_tensor_loops() -> ctypes.CDLL:
    """The functions of tensors.cpp. Raises CompileError, ConfigError."""
    loops = load_library(Path(__file__).with_name("tensors.cpp"))
    address, whole = ctypes.c_void_p, ctypes.c_int64
    for function in (loops.sum_floats, loops.sum_bf16s):
        function.argtypes, function.restype = [address, whole, address, whole, address], ctypes.c_uint64
    loops.copy_all_words.argtypes, loops.copy_all_words.restype = [address, whole, address, address], None
    loops.widen_bf16s.argtypes, loops.widen_bf16s.restype = [address, whole, address], None
    return loops


def sums_of(table: Sequence[Row]) -> list[int]:
    """For each row the part that its words have in a fingerprint (nearflash.training.step.fingerprint).

    Where a row has a target, they are copied there in the same pass.
    """
    sums = np.empty(len(table), np.uint64)
    if table:
        rows = np.array(table, np.int64)
        load_tensor_loops().copy_all_words(find_address(rows), len(rows), find_address(KEYS), find_address(sums))
    found: list[int] = sums.tolist()
    return found


def copy_all(table: Sequence[tuple[int, int, int]]) -> None:
    """Copy for each row to an address from an address so many bytes."""
    for target, source, size_bytes in table:
        ctypes.memmove(target, source, size_bytes)  # without Python's lock


def divide_copies(table: Sequence[tuple[int, int, int]], threads: int) -> list[list[tuple[int, int, int]]]:
    """Divide all bytes, in order, among so many threads that each call `copy_all`."""
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
    offset, share = 0, -(-sum(size_bytes for _, _, size_bytes in table) // (threads * _ALIGNED)) * _ALIGNED
    for target, source, size_bytes in table:
        first = 0
        while first < size_bytes:
            length = min(size_bytes - first, share - offset % share)
            shares[offset // share].append((target + first, source + first, length))
            first, offset = first + length, offset + length
    return shares


def widen_bf16(source: int, out: NDArray[np.float32]) -> None:
    """Write the bf16 numbers at an address as fp32, exactly."""
    load_tensor_loops().widen_bf16s(source, out.size, find_address(out))
