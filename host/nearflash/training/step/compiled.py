"""What compiled loops over tensors are made of: each operation rounded by itself, and words seen as numbers.

LLVM compiles them for the processor at hand (by numba): vector units, one pass over memory, no Python lock. Nothing is
reordered or contracted, since no fast-math flag is given.

Source: LLVM Language Reference (bitcast); numba.extending.intrinsic.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["bf16_number", "compile_loop", "pattern"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FP32, _WORD, _UPPER = ir.FloatType(), ir.IntType(32), np.int32(16)


def compile_loop(function: _Function) -> _Function:
    """The function in machine code, made at its first call; without Python's lock, division by zero as IEEE 754 has."""
    made: _Function = njit(nogil=True, error_model="numpy")(function)
    return made


@intrinsic
def pattern(_: Any, value: Any) -> Any:
    """int32 with the bits of an fp32 number."""
    return types.int32(types.float32), lambda _, builder, signature, values: builder.bitcast(values[0], _WORD)


@intrinsic
def _number(_: Any, word: Any) -> Any:
    """fp32 number of an int32's bits."""
    return types.float32(types.int32), lambda _, builder, signature, words: builder.bitcast(words[0], _FP32)


@compile_loop
def bf16_number(bits: Any) -> Any:
    """fp32 number of a bf16 pattern in an integer: exact."""
    return _number(np.int32(np.int32(bits) << _UPPER))
