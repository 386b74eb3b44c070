"""Loops over tensors that lie in host memory, by their addresses: one call for many, without Python's lock.

torch's own loops would take a team of OpenMP threads for each of the step's threads, more than there are processors.
Addresses and lengths are int64; what lies there must be checked before (`is_plain`), and kept alive.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nearflash.training.step.compiled import compile_loop

__all__ = ["KEYS", "RUN", "WORD_BYTES", "Row", "copy_all", "is_plain", "sums_of", "widen_bf16"]

RUN = 1 << 10
"""Words that share a factor of the fingerprint."""
KEYS = np.random.Generator(np.random.PCG64(0x6E66)).integers(0, 1 << 32, RUN, dtype=np.uint32) | np.uint32(1)

WORD_BYTES = 4
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


def _pointer(bits: int, kind: Any) -> Any:
    @intrinsic
    def pointer(_: Any, address: Any) -> Any:
        """Array at an int64 address, for `carray`."""
        signature = types.CPointer(kind)(types.int64)
        return signature, lambda _, builder, __, given: builder.inttoptr(given[0], ir.IntType(bits).as_pointer())

    return pointer


_halfwords, _words = _pointer(16, types.uint16), _pointer(32, types.uint32)


@compile_loop
def _pass(table: Any, keys: Any, sums: Any) -> None:
    for row in range(len(table)):
        source, target, words, first = table[row]
        total, offset = np.uint64(0), 0
        while offset < words:
            run, phase = divmod(first + offset, RUN)
            length, part = min(RUN - phase, words - offset), np.uint64(0)
            x, k = carray(_words(source + offset * WORD_BYTES), (length,)), keys[phase : phase + length]
            if target:
                y = carray(_words(target + offset * WORD_BYTES), (length,))
                for i in range(length):
                    word = x[i]
                    y[i] = word
                    part += np.uint64(word) * np.uint64(k[i])
            else:
                for i in range(length):
                    part += np.uint64(x[i]) * np.uint64(k[i])
            total += part * np.uint64(2 * run + 1)
            offset += length
        sums[row] = total


def sums_of(table: Sequence[Row]) -> list[int]:
    """For each row the part that its words have in a fingerprint (nearflash.training.step.fingerprint).

    Where a row has a target, they are copied there in the same pass.
    """
    sums = np.empty(len(table), np.uint64)
    if table:
        _pass(np.array(table, np.int64), KEYS, sums)
    results: list[int] = sums.tolist()
    return results


def copy_all(table: Sequence[tuple[int, int, int]]) -> None:
    """Copy for each row to an address from an address so many bytes."""
    for target, source, size_bytes in table:
        ctypes.memmove(target, source, size_bytes)  # without Python's lock


@compile_loop
def _widen(source: Any, out: Any) -> None:
    x = carray(_halfwords(source), (out.size,))
    for i in range(out.size):
        out[i] = np.uint32(x[i]) << np.uint32(16)


def widen_bf16(source: int, out: NDArray[np.float32]) -> None:
    """Write the bf16 numbers at an address as fp32, exactly."""
    _widen(source, out.view(np.uint32))
