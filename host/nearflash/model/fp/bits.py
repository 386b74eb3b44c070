"""Bit patterns, the canonical NaN and exception flags: what the operations share.

Results are (bits, flags): bit patterns and, for each element, the exceptions as a `Flag` mask in a uint8. A result that
is a NaN has one bit pattern.
"""

from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.formats import FP32, NumberFormat

__all__ = ["Bits", "Flag", "Flags", "canonical", "exceptions", "is_signaling", "tiny_below"]

Bits = NDArray[np.uint32]
Flags = NDArray[np.uint8]


class Flag(IntFlag):
    """IEEE 754 exceptions, as in the gateware's FLAGS layout and in Berkeley SoftFloat."""

    INEXACT = 1
    UNDERFLOW = 2
    OVERFLOW = 4
    DIV_BY_ZERO = 8
    INVALID = 16


def canonical(value: NDArray[np.float32]) -> Bits:
    """Bit patterns of fp32 values, every NaN the canonical one."""
    return np.where(np.isnan(value), np.uint32(FP32.canonical_nan), value.view(np.uint32))


def is_signaling(bits: Bits) -> NDArray[np.bool_]:
    """Signaling NaNs: the fraction's top bit is zero."""
    quiet: NDArray[np.bool_] = bits & np.uint32(1 << (FP32.mantissa_bits - 1)) != 0
    return np.isnan(bits.view(np.float32)) & ~quiet


def tiny_below(number: NumberFormat = FP32) -> float:
    """Magnitudes below this are below the normal range also after rounding to the format's full precision."""
    smallest_normal = 2.0 ** (1 - number.bias)
    return smallest_normal * (1 - 2.0 ** -(number.mantissa_bits + 2))


def exceptions(
    operands: tuple[Bits, ...],
    result: NDArray[np.float32],
    *,
    inexact: Any,
    tiny: Any = False,
    invalid: Any = None,
    div_by_zero: Any = False,
) -> Flags:
    """Flags of an operation from its operands' and its result's values and what was found of the exact result.

    `inexact` and `tiny` count only where all operands and the exact result are finite; `invalid` is by default a NaN
    that no operand is.
    """
    values = [operand.view(np.float32) for operand in operands]
    finite = np.logical_and.reduce([np.isfinite(value) for value in values]) & ~np.isnan(result)
    if invalid is None:
        invalid = np.isnan(result) & ~np.logical_or.reduce([np.isnan(value) for value in values])
    invalid = invalid | np.logical_or.reduce([is_signaling(operand) for operand in operands])
    finite = finite & np.logical_not(div_by_zero)
    overflow = finite & np.isinf(result)
    inexact = finite & inexact | overflow
    flags = np.zeros(result.shape, np.uint8)
    for flag, raised in (
        (Flag.INEXACT, inexact),
        (Flag.UNDERFLOW, inexact & tiny & ~overflow),
        (Flag.OVERFLOW, overflow),
        (Flag.DIV_BY_ZERO, div_by_zero),
        (Flag.INVALID, invalid),
    ):
        flags |= np.where(raised, np.uint8(flag), np.uint8(0))
    return flags
