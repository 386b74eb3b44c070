import numpy as np

from nearflash.model.nand.bch.field import ORDER, multiply, power


def carryless(a: int, b: int) -> int:
    """Schoolbook product modulo x^13 + x^4 + x^3 + x + 1."""
    product = 0
    for k in range(13):
        product ^= (b >> k & 1) * (a << k)
    for k in range(25, 12, -1):
        product ^= (product >> k & 1) * (0b10_0000_0001_1011 << (k - 13))
    return product


def test_products():
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, ORDER + 1, (2, 2000)).astype(np.int32)
    a[:20] = b[10:30] = 0
    expected = [carryless(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    np.testing.assert_array_equal(multiply(a, b), expected)


def test_alpha_is_primitive():
    assert len(set(power(np.arange(ORDER)).tolist())) == ORDER
    assert power(np.array(1)) == 2 and power(np.array(-ORDER)) == 1
