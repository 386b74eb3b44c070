"""Exact sums against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest

from nearflash.model.attention.numerics.dot import dot_truncated, exact_dot, exact_sum
from nearflash.model.attention.numerics.product import multiply_truncated

ONE = 2**48


def test_dot_is_the_exact_sum(fp16_values):
    a, b = fp16_values(40 * 256, 1).reshape(40, 256), fp16_values(256 * 3, 2).reshape(256, 3)
    found = exact_dot(a, b)
    for row, column in np.ndindex(40, 3):
        pairs = zip(a[row].tolist(), b[:, column].tolist(), strict=True)
        assert found[row, column] == ONE * sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0))


def test_cancellation_leaves_the_least_bit():
    a = np.array([[65504, 2.0**-24, -65504]], np.float16)
    assert exact_dot(a, np.array([65504, 2.0**-24, 65504], np.float16)).tolist() == [1]


def test_widest_sums():
    largest = np.full((1, 256), 65504, np.float16)
    assert exact_dot(largest, largest[0])[0] == 256 * 65504**2 * ONE < 1 << 89
    long = np.full(1 << 17, 65504, np.float16)
    assert exact_dot(long, -long) == -(65504**2) * ONE << 17
    assert exact_sum(long) == 65504 * ONE << 17


def test_sum(fp16_values):
    values = fp16_values(5 * 1_000, 3).reshape(5, 1_000)
    assert exact_sum(values).tolist() == [ONE * sum(map(Fraction, row)) for row in values.tolist()]


def test_truncated_dot(fp16_values):
    a, b = fp16_values(7 * 64, 4).reshape(7, 64), fp16_values(64, 5)
    assert dot_truncated(a, b).tolist() == [sum(multiply_truncated(row, b).tolist()) for row in a]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_message_for_values_that_are_not_finite(value):
    with pytest.raises(ValueError, match="fp16 values must be finite"):
        exact_dot(np.array([[value]], np.float16), np.array([0], np.float16))


def test_message_for_too_many_terms():
    with pytest.raises(ValueError, match="must have at most 1048576 terms, not 1048577"):
        exact_dot(np.zeros((1, (1 << 20) + 1), np.float16), np.zeros((1 << 20) + 1, np.float16))
