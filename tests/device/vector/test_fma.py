"""Multiply-add of the host's vectors rounds once."""

import numpy as np

from nearflash.device.vector.fma import Fma


def test_fma_rounds_once():
    """(1 + e)(1 - e) is just below one: c and half an ulp, less a little that a double cannot hold, is no tie."""
    e, n = 2.0**-20, 1 << 12
    rng = np.random.default_rng(2)
    fma = Fma(n)
    for ulp, c in (
        (2.0**-23, rng.uniform(1, 2, n)),
        (2.0**-149, rng.uniform(2.0**-134, 2.0**-126, n)),  # subnormal results
    ):
        c = c.astype(np.float32)
        a = np.full(n, 2.0**-75 * (1 + e), np.float32)
        b = np.float32(ulp * 2.0**74 * (1 - e))
        out = fma(a, b, c, np.empty_like(a))
        np.testing.assert_array_equal(out, c)  # just under half an ulp more
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
        assert np.count_nonzero(twice != c) > n / 3  # what two roundings would have given
        np.testing.assert_array_equal(fma(-a, b, -c, np.empty_like(a)), -c)
        with np.errstate(all="ignore"):
            poisoned = np.concatenate([c[:-1], np.float32([np.nan])])
            np.testing.assert_array_equal(fma(a, b, poisoned, np.empty_like(a)), poisoned)
