"""Every fraction against 2^f of the decimal module."""

from decimal import Decimal, localcontext

import numpy as np

from nearflash.model.attention.numerics.exp2 import significand


def test_every_fraction_is_within_052_ulp():
    found = significand(np.arange(1 << 16))
    with localcontext(prec=40):
        exact, step = Decimal(1024), (Decimal(2).ln() / (1 << 16)).exp()
        worst = Decimal(0)
        for one in found.tolist():
            worst = max(worst, abs(one - exact))
            exact *= step
    assert abs(exact - 2048) < Decimal("1e-30")
    assert Decimal("0.51") < worst < Decimal("0.515")


def test_monotone_from_1024_to_2048():
    found = significand(np.arange(1 << 16))
    assert found[0] == 1024 and found[-1] == 2048
    assert set(np.diff(found)) == {0, 1}
