"""Products of fp16 values: exact, cut toward zero, and rounded to a fixed point."""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.fixed_point import EXACT_LSB, SCORE_LSB, score_limit_log2

__all__ = ["Fp16", "exact_product", "exceeds", "fp16_operand", "multiply_rounded", "multiply_truncated"]

Fp16 = NDArray[np.float16]


def _wide(a: Fp16, b: Fp16) -> NDArray[np.float64]:
    """a · b, exact: 22 significand bits, exponents far inside those of a double."""
    product: NDArray[np.float64] = a.astype(np.float64) * b.astype(np.float64)
    return product


def exact_product(a: Fp16, b: Fp16) -> NDArray[np.object_]:
    """a · b of finite values in units of 2^EXACT_LSB, as Python integers (80 bits and the sign); operands broadcast."""
    fraction, exponent = np.frexp(_wide(a, b))
    significand, shift = np.ldexp(fraction, 22).astype(np.int64), exponent - 22 - EXACT_LSB
    return np.asarray(np.where(shift < 0, significand >> -shift.clip(max=0), significand).astype(object)
                      << shift.clip(min=0).astype(object))  # fmt: skip


def multiply_truncated(a: Fp16, b: Fp16) -> NDArray[np.int64]:
    """a · b of finite values, cut toward zero to a multiple of 2^SCORE_LSB, in that unit; operands broadcast."""
    return np.trunc(_wide(a, b) * 2.0**-SCORE_LSB).astype(np.int64)


def multiply_rounded(a: Fp16, b: Fp16, lsb: int) -> NDArray[np.int64]:
    """a · b of finite values, rounded to nearest even to a multiple of 2^lsb, in that unit (lsb -20 at least)."""
    return np.rint(_wide(a, b) * 2.0**-lsb).astype(np.int64)


def exceeds(a: Fp16, b: Fp16, score_dims: int) -> NDArray[np.bool_]:
    """Find where |a · b| breaks the range rule of fp16 scores over `score_dims` dims: at least twice the limit."""
    return np.asarray(np.abs(_wide(a, b)) >= 2.0 ** (1 + score_limit_log2(score_dims)))


def fp16_operand(a: Fp16) -> NDArray[np.int64]:
    """Encode finite values as the gateware does, in 18 bits: significand times 2^(exponent field mod 4), from bit 14 on
    the field's upper bits, the sign. A subnormal's field counts 1."""
    bits = a.view(np.uint16).astype(np.int64)
    field = bits >> 10 & 0x1F
    significand = bits & 0x3FF | (field != 0).astype(np.int64) << 10
    field = np.maximum(field, 1)
    return np.asarray(significand << (field & 3) | field >> 2 << 14 | bits >> 15 << 17)
