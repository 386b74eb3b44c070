"""fp32 of exact integers: the nearest of its neighbours in exact fractions."""

from fractions import Fraction

import numpy as np
import pytest

from nearflash.model.attention.numerics.raw import to_fp32


@pytest.mark.parametrize("lsb", [-48, -24, 0])
def test_is_the_nearest(lsb):
    rng = np.random.default_rng(1)
    values = [int.from_bytes(rng.bytes(13), "little", signed=True) >> int(rng.integers(0, 104)) for _ in range(2_000)]
    values += [sign * ((1 << 24) + k << 40) + step for sign in (1, -1) for k in (1, 3) for step in (-1, 0, 1)]
    values = [value >> max(0, value.bit_length() - 97) for value in values]
    found = to_fp32(np.array(values, object), lsb)
    below, above = (np.nextafter(found, np.float32(end)) for end in (-np.inf, np.inf))
    for value, *near in zip(values, found.tolist(), below.tolist(), above.tolist(), strict=True):
        error, under, over = (abs(Fraction(one) - value * Fraction(2) ** lsb) for one in near)
        assert error <= min(under, over)
        if error in (under, over):
            assert np.float32(near[0]).view(np.uint32) % 2 == 0, "a tie goes to the even one"


def test_agrees_with_numpy_where_a_double_holds_it():
    values = np.random.default_rng(2).integers(-(1 << 52), 1 << 52, (3, 500))
    np.testing.assert_array_equal(to_fp32(values, -10), np.ldexp(values.astype(np.float64), -10).astype(np.float32))


def test_zero_is_positive():
    assert not np.signbit(to_fp32(np.array([0], object), -48)[0])
