"""What compiled loops over fp32 vectors are made of: each operation rounded by itself, and words seen as numbers.

LLVM compiles them for the processor at hand (by numba): vector units, one pass over memory, no Python lock. Nothing is
reordered or contracted, since no fast-math flag is given; a fused multiply-add is there where `fma` asks for one.

Source: LLVM Language Reference (llvm.fma, fptrunc, bitcast); numba.extending.intrinsic.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["bf16_number", "bf16_pattern", "compiled", "fma", "fp16_pattern", "number", "pattern"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FP32, _FP16, _WORD, _HALFWORD = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(16)


def compiled(function: _Function) -> _Function:
    """The function in machine code, made at its first call; without Python's lock, division by zero as IEEE 754 has."""
    made: _Function = njit(nogil=True, error_model="numpy")(function)
    return made


@intrinsic  # type: ignore[untyped-decorator]
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """fp32: a·b + c, rounded once."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_FP32, [_FP32] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fma", [_FP32], kind), arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def pattern(_: Any, value: Any) -> Any:
    """int32 with the bits of an fp32 number."""
    return types.int32(types.float32), lambda _, builder, signature, values: builder.bitcast(values[0], _WORD)


@intrinsic  # type: ignore[untyped-decorator]
def number(_: Any, word: Any) -> Any:
    """fp32 number of an int32's bits."""
    return types.float32(types.int32), lambda _, builder, signature, words: builder.bitcast(words[0], _FP32)


@intrinsic  # type: ignore[untyped-decorator]
def fp16_pattern(_: Any, value: Any) -> Any:
    """uint16 with the bits of an fp32 number rounded to fp16, nearest even."""

    def generate(_: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], _FP16), _HALFWORD)

    return types.uint16(types.float32), generate


_ONE, _HALF, _UPPER = np.int32(1), np.int32(0x7FFF), np.int32(16)


@compiled
def bf16_pattern(value: Any) -> Any:
    """uint16 with the bits of an fp32 number, not a NaN but the canonical one, rounded to bf16, nearest even."""
    word = pattern(value)
    odd = np.int32(np.int32(word >> _UPPER) & _ONE)
    return np.uint16(np.int32(np.int32(word + odd) + _HALF) >> _UPPER)


@compiled
def bf16_number(bits: Any) -> Any:
    """fp32 number of a bf16 pattern in an integer: exact."""
    return number(np.int32(np.int32(bits) << _UPPER))
