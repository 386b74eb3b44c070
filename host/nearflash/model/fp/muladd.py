"""fp32 multiply-add: fused, unfused, and the division by an invariant."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.abi.registers import FACTOR_BITS
from nearflash.model.fp.add import add
from nearflash.model.fp.bits import Bits, Flags, canonical, exceptions, tiny_below
from nearflash.model.fp.mul import mul

__all__ = ["RECIPROCAL_BITS", "Reciprocal", "fma", "mul_reciprocal", "muladd"]

#: Significand bits of a reciprocal that gives exact quotients; see nearflash.gateware.fp.muladd.
RECIPROCAL_BITS = FACTOR_BITS
_BLOCK = 16384  # elements whose intermediate doubles stay in the second-level cache


def muladd(a: Bits, b: Bits, c: Bits, *, fused: bool) -> tuple[Bits, Flags]:
    """rn(a * b + c) where fused, else rn(rn(a * b) + c), of bit patterns, and the exceptions."""
    if not fused:
        product, product_flags = mul(a, b)
        bits, sum_flags = add(product, c)
        return bits, product_flags | sum_flags
    x, y, z = (bits.view(np.float32) for bits in (a, b, c))
    with np.errstate(all="ignore"):
        odd = _fma_to_odd(x, y, z)
        total = odd.astype(np.float32)
        mixed = (np.isinf(x) & (y == 0)) | ((x == 0) & np.isinf(y))
        lost = np.isnan(odd) & ~(np.isnan(x) | np.isnan(y) | np.isnan(z))
        tiny = np.abs(odd) < tiny_below()
        flags = exceptions((a, b, c), total, inexact=odd != total, tiny=tiny, invalid=mixed | lost)
        return canonical(total), flags


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.float32]:
    """rn(a * b + c) of float32 arrays or scalars that broadcast; no exceptions, NaNs as they come."""
    x, y, z = np.broadcast_arrays(*(np.asarray(value, np.float32) for value in (a, b, c)))
    result = np.empty(x.shape, np.float32)
    flat = result.reshape(-1)
    x, y, z = x.reshape(-1), y.reshape(-1), z.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            flat[block] = _fma_to_odd(x[block], y[block], z[block])
    return result


def _fma_to_odd(x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]) -> NDArray[np.float64]:
    """a * b + c in double, rounded to odd: one more rounding to fp32 is then the only one that counts."""
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # TwoSum: total + error is exact
    bits = total.view(np.int64)
    towards = 1 - 2 * ((error < 0) ^ (total < 0)).view(np.int8)
    step = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    odd: NDArray[np.float64] = (bits + step * towards).view(np.float64)
    return odd


@dataclass(frozen=True)
class Reciprocal:
    """1/s cut to RECIPROCAL_BITS: (-1)**sign * sig / 2**(RECIPROCAL_BITS - 1) * 2**exp, as in RawLayout.

    s: a finite fp32 value, not zero. Raises ValueError for another one.
    """

    sign: int
    exp: int
    sig: int

    @classmethod
    def of(cls, s: float) -> "Reciprocal":
        """The reciprocal of fp32 s."""
        if not np.isfinite(s) or s == 0 or float(np.float32(s)) != float(s):
            raise ValueError(f"s must be a finite fp32 value that is not zero, not {s!r}")
        numerator, denominator = abs(float(s)).as_integer_ratio()
        exp = denominator.bit_length() - numerator.bit_length()
        exp -= denominator << max(0, -exp) < numerator << max(0, exp)
        shift = RECIPROCAL_BITS - 1 - exp
        sig = (denominator << max(0, shift)) // (numerator << max(0, -shift))
        return cls(int(s < 0), exp, sig)


def mul_reciprocal(a: Bits, reciprocal: Reciprocal) -> tuple[Bits, Flags]:
    """rn(a * reciprocal) of bit patterns, and the exceptions: rn(a / s) where that is not subnormal.

    `inexact` is that of the product, which a quotient that is an fp32 value raises too.
    """
    x = a.view(np.float32)
    with np.errstate(all="ignore"):
        fraction, exponent = np.frexp(np.where(np.isfinite(x), x, 0).astype(np.float64))
        sig = (np.abs(fraction) * 2.0**24).astype(np.uint64)
        low = sig * np.uint64(reciprocal.sig & 0xFFFFFF)
        high = sig * np.uint64(reciprocal.sig >> 24) + (low >> np.uint64(24))
        odd = high | (low & np.uint64(0xFFFFFF) != 0)  # at most 51 bits: exact as a double
        wide = np.ldexp(odd.astype(np.float64), exponent + (reciprocal.exp - (RECIPROCAL_BITS - 1)))
        wide = np.copysign(np.where(np.isfinite(x), wide, np.abs(x)), x) * (1 - 2 * reciprocal.sign)
        product = wide.astype(np.float32)
        return canonical(product), exceptions((a,), product, inexact=wide != product, tiny=np.abs(wide) < tiny_below())
