"""Weights against numpy's own rounding of significand · 2^n to fp16."""

import numpy as np

from nearflash.model.attention.numerics.exp2 import significand
from nearflash.model.attention.numerics.weight import to_weight


def test_equals_numpys_rounding():
    rng = np.random.default_rng(1)
    logit = rng.integers(-40 << 16, 20 << 16, 40_000)
    reference = rng.integers(-8, 9, 40_000)
    weight, over = to_weight(logit, reference)
    power = (logit >> 16) - reference + 7 - 10
    with np.errstate(over="ignore"):
        exact = np.ldexp(significand(logit & 0xFFFF).astype(np.float64), power).astype(np.float16)
    np.testing.assert_array_equal(over, np.isinf(exact))
    np.testing.assert_array_equal(weight, np.where(over, np.float16(65504), exact))
    assert over.any() and (weight == 0).any() and ((weight > 0) & (weight < 2.0**-14)).any()


def test_edges():
    one = np.array([0, 8, 9, -21, -31, -32, -33, -2048, 2047]) << 16
    weight, over = to_weight(one, 0)
    assert weight.tolist() == [2.0**7, 2.0**15, 65504, 2.0**-14, 2.0**-24, 0, 0, 0, 65504]
    assert over.tolist() == [False, False, True, False, False, False, False, False, True]
    last_fraction, over = to_weight(np.array([(9 << 16) - 1]), 0)
    assert last_fraction[0] == 65504 and over[0], "its significand rounds up to 2048"
