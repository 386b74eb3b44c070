import numpy as np

from nearflash.model.fp.mul import mul
from nearflash.verify.fixtures.softfloat import softfloat
from nearflash.verify.fixtures.vectors import operands


def test_equals_softfloat():
    a, b = operands(60_000, 2, seed=2)
    bits, flags = mul(a, b)
    expected, expected_flags = softfloat("mul", a, b)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(flags, expected_flags)
    assert set(np.unique(flags)) == {0, 1, 3, 5, 16}, "the operands must reach these exceptions"
