"""The multiply-add model against SoftFloat, the C library and exact fractions."""

import ctypes
import math
from fractions import Fraction

import numpy as np
import pytest

from nearflash.abi.optimizers import AdamStep
from nearflash.abi.optimizers.program import denominator_factor
from nearflash.abi.registers import UPDATE
from nearflash.model.fp.bits import canonical
from nearflash.model.fp.muladd import RECIPROCAL_BITS, Reciprocal, fma, mul_reciprocal, muladd
from nearflash.verify.fixtures.softfloat import softfloat
from nearflash.verify.fixtures.vectors import operands


def test_fused_equals_softfloat():
    a, b, c = operands(60_000, 3, seed=5)
    bits, flags = muladd(a, b, c, fused=True)
    expected, expected_flags = softfloat("fma", a, b, c)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(flags, expected_flags)
    assert set(np.unique(flags)) == {0, 1, 3, 5, 16}


def test_unfused_equals_softfloat():
    a, b, c = operands(60_000, 3, seed=6)
    bits, flags = muladd(a, b, c, fused=False)
    product, product_flags = softfloat("mul", a, b)
    expected, sum_flags = softfloat("add", product, c)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(flags, product_flags | sum_flags)


def test_fma_equals_the_c_library():
    function = ctypes.CDLL("libm.so.6").fmaf
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a, b, c = (bits.view(np.float32) for bits in operands(20_000, 3, seed=7))
    expected = np.array([function(*values) for values in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])
    with np.errstate(all="ignore"):
        expected = expected.astype(np.float32)
    np.testing.assert_array_equal(canonical(fma(a, b, c)), canonical(expected))


def test_fma_is_the_nearest_fp32_to_the_exact_value():
    a, b, c = (bits.view(np.float32) for bits in operands(2_000, 3, seed=8))
    result = fma(a, b, c)
    below, above = (np.nextafter(result, np.float32(end)) for end in (-np.inf, np.inf))
    finite = np.isfinite([a, b, c, result, below, above]).all(axis=0)
    assert finite.sum() > 500
    rows = np.stack([a, b, c, result, below, above], axis=1)[finite]
    for *operand, nearest, under, over in rows.tolist():
        exact = Fraction(operand[0]) * Fraction(operand[1]) + Fraction(operand[2])
        error = abs(Fraction(nearest) - exact)
        assert error <= min(abs(Fraction(under) - exact), abs(Fraction(over) - exact))
        if error in (abs(Fraction(under) - exact), abs(Fraction(over) - exact)):
            assert np.float32(nearest).view(np.uint32) % 2 == 0, "a tie goes to the even one"


def test_fma_broadcasts_and_crosses_blocks():
    a = np.arange(40_000, dtype=np.float32).reshape(4, 10_000)
    np.testing.assert_array_equal(fma(a, np.float32(2), 1), a * 2 + 1)


def test_reciprocal_is_cut_to_its_bits():
    for s in (1.0, 3.0, -0.1, 2.0**-149, 3.4028234663852886e38, 1.0000001192092896, 0.9999999403953552):
        value = float(np.float32(s))
        r = Reciprocal.of(value)
        assert r.sig.bit_length() == RECIPROCAL_BITS
        one = Fraction(abs(value)) * r.sig * Fraction(2) ** (r.exp - RECIPROCAL_BITS + 1)
        assert 1 - Fraction(1, 2 ** (RECIPROCAL_BITS - 1)) < one <= 1
        assert r.sign == (value < 0)


@pytest.mark.parametrize("s", [0.0, math.inf, math.nan, 0.1])
def test_reciprocal_message(s):
    with pytest.raises(ValueError, match="s must be a finite fp32 value that is not zero, not"):
        Reciprocal.of(s)


def quotient(a: np.ndarray, s: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return a.view(np.float32) / np.float32(s)


@pytest.mark.parametrize("step", [1, 2, 7, 1000, 10**6])
def test_a_command_carries_the_models_reciprocal(step):
    adam = AdamStep(lr=1e-3, step=step)
    fields = UPDATE["denominator_factor"].unpack(denominator_factor(adam))
    reciprocal = Reciprocal.of(adam.bias_correction2_sqrt)
    assert (fields["significand"], fields["exponent"]) == (reciprocal.sig, reciprocal.exp & 0x3FF)


def test_product_with_a_reciprocal_is_the_quotient():
    """Also for dividends next to a rounding boundary: a = nearest of s * M / 2**24, one unit up and down."""
    rng = np.random.default_rng(9)
    scalars = operands(400, 1, seed=10)[0].view(np.float32)
    for s in scalars[np.isfinite(scalars) & (scalars != 0)].tolist():
        boundaries = (2 * rng.integers(1 << 23, 1 << 24, 300) + 1) / 2.0**24
        with np.errstate(all="ignore"):
            near = (s * boundaries).astype(np.float32).view(np.uint32)
        a = np.concatenate([near, near - np.uint32(1), near + np.uint32(1), *operands(300, 1, seed=11)])
        exact = quotient(a, s)
        normal = ~((np.abs(exact) < 2.0**-126) & (a & np.uint32(0x7FFFFFFF) != 0))
        found, _ = mul_reciprocal(a, Reciprocal.of(s))
        np.testing.assert_array_equal(found[normal], canonical(exact)[normal])


def test_exceptions_of_a_product_with_a_reciprocal():
    a = np.array([3.0, 2.0, 2.0**-140, 1e38, 0.0, np.inf, np.nan], np.float32).view(np.uint32)
    flags = [mul_reciprocal(a[k : k + 1], Reciprocal.of(s))[1][0] for k, s in enumerate([3, 4, 3, 2.0**-20, 3, 3, 3])]
    assert flags == [1, 0, 3, 5, 0, 0, 0]


def test_a_subnormal_quotient_that_is_a_tie_is_rounded_down():
    """The documented limit: 9 * 2**-149 / 6 lies between two subnormals."""
    a = np.array([9], np.uint32)
    assert canonical(quotient(a, 6.0))[0] == 2
    assert mul_reciprocal(a, Reciprocal.of(6.0))[0][0] == 1
