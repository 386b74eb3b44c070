"""Operands that reach the corners of floating point units: classes as in Berkeley TestFloat, and random ones.

A corner has an exponent field that is special (near zero, the bias, the top) and a fraction that is special (zero,
ones, one bit set or cleared, a run of ones from either end).
"""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.formats import FP32, NumberFormat

__all__ = ["corner_pairs", "corner_values", "narrow_operands", "operands"]


def corner_values(number: NumberFormat = FP32) -> NDArray[np.uint32]:
    """All corner bit patterns of a format, each once, ascending."""
    bits, top = number.mantissa_bits, (1 << number.exponent_bits) - 1
    ones = (1 << bits) - 1
    runs = [ones >> k for k in range(bits + 1)]
    single = [1 << k for k in range(bits)]
    fractions = {*runs, *single, *(ones ^ f for f in (*runs, *single))}
    near = {number.bias + k for k in (-number.mantissa_bits - 2, -2, -1, 0, 1, 2, number.mantissa_bits + 2)}
    exponents = {e for e in {0, 1, 2, top - 2, top - 1, top, *near} if 0 <= e <= top}
    sign = 1 << (number.bits - 1)
    values = {s | e << bits | f for s in (0, sign) for e in exponents for f in fractions}
    return np.array(sorted(values), np.uint32)


def corner_pairs() -> list[NDArray[np.uint32]]:
    """Every pair of fp32 corners, as two arrays."""
    corners = corner_values()
    return [np.repeat(corners, len(corners)), np.tile(corners, len(corners))]


def operands(count: int, arity: int, seed: int) -> list[NDArray[np.uint32]]:
    """`arity` arrays of `count` fp32 bit patterns: a third corners, a third random, a third at related exponents.

    Related: the second operand's exponent is near the first's or mirrors it about the bias (so that products come near
    one, the largest value or the smallest), the third's is near that of the product of the two.
    """
    rng = np.random.default_rng(seed)
    corners = corner_values()
    columns = []
    kind = rng.integers(0, 3, count)
    first_exponent = rng.integers(0, 256, count)
    related = first_exponent
    for position in range(arity):
        if position == 1:
            goal = rng.choice(np.array([0, 127, 254, -24, -1]), count)  # product exponents, biased; or the same as a
            mirrored = goal + 127 - first_exponent
            related = np.where(rng.integers(0, 2, count) == 0, first_exponent, mirrored) + rng.integers(-2, 3, count)
        elif position == 2:
            related = first_exponent + related - 127 + rng.integers(-50, 51, count)
        exponent = np.clip(related, 0, 255).astype(np.uint32)
        fraction = rng.integers(0, 1 << 23, count, dtype=np.uint32)
        sparse = corners[rng.integers(0, len(corners), count)] & np.uint32(0x7FFFFF)
        fraction = np.where(rng.integers(0, 3, count) == 0, sparse, fraction)
        sign = rng.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
        near = sign | exponent << np.uint32(23) | fraction
        chosen = np.where(kind == 1, rng.integers(0, 1 << 32, count, dtype=np.uint32), near)
        columns.append(np.where(kind == 0, corners[rng.integers(0, len(corners), count)], chosen).astype(np.uint32))
    return columns


def narrow_operands(count: int, number: NumberFormat, seed: int) -> NDArray[np.uint32]:
    """fp32 bit patterns at and next to the values of a 16-bit format and the boundaries halfway between them."""
    rng = np.random.default_rng(seed)
    dropped = FP32.mantissa_bits - number.mantissa_bits
    exponent = rng.integers(-number.mantissa_bits - 3, (1 << number.exponent_bits) + 1, count)
    biased = np.clip(exponent + FP32.bias - number.bias, 0, 255).astype(np.uint32)
    # Halfway points of normal values, and those of subnormal ones, some bits further up.
    place = dropped - 1 + np.maximum(0, 1 - exponent)
    ones = np.where(rng.integers(0, 4, count) == 0, (1 << FP32.mantissa_bits) - (1 << dropped), 0)
    fraction = ((ones | rng.integers(0, 1 << 24, count)) >> place << place) + rng.integers(-1, 2, count)
    sign = rng.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    return sign | biased << np.uint32(FP32.mantissa_bits) | (fraction & 0x7FFFFF).astype(np.uint32)
