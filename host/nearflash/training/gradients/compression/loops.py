"""A compiled call from fp32 gradients in host memory to a stream and what it leaves out: the bits of the torch code."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.topk import HEADER_BYTES, StreamHeader, ValueFormat, longest_stream_bytes
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.support.native import find_address, load_library

__all__ = ["Compressed", "compress_range"]

_ADDRESS, _I64 = ctypes.c_void_p, ctypes.c_int64
Compressed = tuple[NDArray[np.uint8], list[NDArray[Any]], int]
"""A stream, what it leaves out as it is held, and how many sums are not finite: then there is no stream."""


class _Residual(ctypes.Structure):
    """`Residual` of loops.cpp."""

    _fields_ = (("nibbles", _ADDRESS), ("scales", _ADDRESS), ("numbers", _ADDRESS))

    @classmethod
    def of(cls, arrays: Sequence[NDArray[Any]]) -> "_Residual":
        names = ("nibbles", "scales") if len(arrays) > 1 else ("numbers",)
        return cls(**{name: find_address(array) for name, array in zip(names, arrays, strict=False)})


class _Outcome(ctypes.Structure):
    """`Outcome` of loops.cpp."""

    _fields_ = tuple((name, _I64) for name in ("nonfinite", "pairs", "stream_bytes", "words_crc32c"))


def compress_range(
    gradients: NDArray[np.float32], count: int, value_format: ValueFormat, held: Sequence[NDArray[Any]]
) -> Compressed:
    """Keep the `count` largest of gradients (n,) plus what `held` has of them, all contiguous, n a multiple of 16.

    held: nibbles (n / 2,) and scales (n / 16,), or fp32 numbers (n,), or nothing.
    """
    params, outcome = gradients.size, _Outcome()
    stream = np.empty(longest_stream_bytes(params, count, value_format), np.uint8)
    left = [np.empty_like(array) for array in held]
    residuals = [ctypes.byref(_Residual.of(arrays)) for arrays in (held, left)]
    memory = reuse_buffer(8 * params + 128)
    places = find_address(memory), find_address(stream), ctypes.byref(outcome)
    _load().compress(find_address(gradients), params, count, value_format, *residuals, *places)
    if outcome.nonfinite:
        return stream[:0], [], outcome.nonfinite
    header = StreamHeader(value_format, params, outcome.pairs, outcome.stream_bytes, outcome.words_crc32c)
    stream[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return stream[: outcome.stream_bytes], left, 0


@cache
def _load() -> ctypes.CDLL:
    loops = load_library(Path(__file__).with_name("loops.cpp"))
    loops.compress.argtypes = [_ADDRESS, _I64, _I64, ctypes.c_int32, *[_ADDRESS] * 5]
    loops.compress.restype = None
    return loops
