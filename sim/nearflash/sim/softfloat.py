"""Berkeley SoftFloat (the package softfloatpy) over arrays of bit patterns: the oracle of the floating point units.

One Python call an element: about half a million operations a second. Rounding is to nearest even, tininess is detected
after rounding, and NaNs become the format's canonical one, as everywhere in nearflash.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import softfloatpy as sf
from numpy.typing import NDArray

from nearflash.abi.formats import BF16, FP16, FP32, NumberFormat

__all__ = ["OPERATIONS", "softfloat"]

#: Operations on fp32 operands: SoftFloat's function and the result's format.
OPERATIONS: dict[str, tuple[Callable[..., Any], NumberFormat]] = {
    "add": (sf.f32_add, FP32),
    "mul": (sf.f32_mul, FP32),
    "div": (sf.f32_div, FP32),
    "sqrt": (sf.f32_sqrt, FP32),
    "fma": (sf.f32_mul_add, FP32),
    "to_fp16": (sf.f32_to_f16, FP16),
    "to_bf16": (sf.f32_to_bf16, BF16),
}


def softfloat(operation: str, *operands: NDArray[np.uint32]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Bit patterns of the results (uint16 for a 16-bit format) and the exceptions, in SoftFloat's encoding."""
    function, number = OPERATIONS[operation]
    sf.set_rounding_mode(sf.RoundingMode.NEAR_EVEN)
    sf.set_tininess_mode(sf.TininessMode.AFTER_ROUNDING)
    results, flags = [], bytearray()
    for arguments in zip(*(_floats(column) for column in operands), strict=True):
        sf.set_exception_flags(0)
        results.append(function(*arguments).to_bytes())
        flags.append(sf.get_exception_flags())
    bits = np.frombuffer(b"".join(results), f">u{number.bytes}").astype(f"u{number.bytes}")
    infinity = ((1 << number.exponent_bits) - 1) << number.mantissa_bits
    bits[bits & ((1 << (number.bits - 1)) - 1) > infinity] = number.canonical_nan
    return bits, np.frombuffer(bytes(flags), np.uint8)


def _floats(column: NDArray[np.uint32]) -> list[Any]:
    text = column.astype(">u4").tobytes()
    return [sf.Float32.from_bytes(text[start : start + 4]) for start in range(0, len(text), 4)]
