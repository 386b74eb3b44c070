import numpy as np

from nearflash.model.fp.sqrt import sqrt
from nearflash.verify.fixtures.softfloat import softfloat
from nearflash.verify.fixtures.vectors import operands


def test_equals_softfloat():
    (a,) = operands(60_000, 1, seed=4)
    bits, flags = sqrt(a)
    expected, expected_flags = softfloat("sqrt", a)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(flags, expected_flags)
    assert set(np.unique(flags)) == {0, 1, 16}


def test_squares_are_exact():
    roots = np.arange(1, 4096, dtype=np.float32)
    bits, flags = sqrt((roots * roots).view(np.uint32))
    np.testing.assert_array_equal(bits.view(np.float32), roots)
    assert not flags.any()
