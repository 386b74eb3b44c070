"""Products against exact fractions."""

import math
from fractions import Fraction

import numpy as np

from nearflash.model.attention.numerics.product import exact_product, exceeds, multiply_rounded, multiply_truncated


def fractions(a, b):
    return [Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def test_exact_product(fp16_values):
    a, b = fp16_values(4_000, 1), fp16_values(4_000, 2)
    assert exact_product(a, b).tolist() == [value * 2**48 for value in fractions(a, b)]


def test_cut_is_toward_zero(fp16_values):
    a, b = fp16_values(4_000, 3), fp16_values(4_000, 4)
    assert multiply_truncated(a, b).tolist() == [math.trunc(value * 2**16) for value in fractions(a, b)]


def test_rounding_is_to_nearest_even(fp16_values):
    a, b = fp16_values(4_000, 5), fp16_values(4_000, 6)
    for lsb in (-10, -14, -16):
        assert multiply_rounded(a, b, lsb).tolist() == [round(value * 2**-lsb) for value in fractions(a, b)]


def test_ties():
    half = np.float16(2.0**-9)
    assert multiply_rounded(np.array([1, 3, 5, -3], np.float16), half, -8).tolist() == [0, 2, 2, -2]


def test_exceeds_from_twice_the_limit_on():
    a = np.array([256, 511.75, 512, -512, 513], np.float16)
    for channels, power in ((1, 19), (2, 18), (16, 15), (17, 14), (256, 11)):
        b = np.float16(2.0 ** (power - 9))
        assert exceeds(a, b, channels).tolist() == [False, False, True, True, True]
