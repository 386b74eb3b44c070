"""Logits against exact fractions."""

from fractions import Fraction

import numpy as np

from nearflash.model.attention.numerics.logit import to_logit


def test_equals_round():
    rng = np.random.default_rng(1)
    score = rng.integers(-(1 << 35), 1 << 35, 4_000) >> rng.integers(0, 36, 4_000)
    scale = np.ldexp(rng.random(4_000) + 1, rng.integers(-14, 8, 4_000)).astype(np.float32)
    scale = np.where(scale < 256, scale, np.float32(1))
    scale[:400] = 2.0 ** rng.integers(-14, 8, 400)  # powers of two give ties
    logit, outside = to_logit(score, scale)
    exact = [round(s * Fraction(c)) for s, c in zip(score.tolist(), scale.tolist(), strict=True)]
    assert logit.tolist() == [min(max(one, -(1 << 27)), (1 << 27) - 1) for one in exact]
    assert outside.tolist() == [not -(1 << 27) <= one < 1 << 27 for one in exact]
    assert 0 < outside.mean() < 1


def test_a_scale_outside_its_range():
    scale = np.array([0, 2.0**-15, 2.0**-14, 255.9, 256, np.inf, np.nan, -1], np.float32)
    logit, outside = to_logit(np.full(8, 1 << 14), scale)
    assert outside.tolist() == [True, True, False, False, True, True, True, True]
    assert (logit[outside] == 0).all()
