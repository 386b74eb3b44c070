"""Scores against exact fractions; Python's round of a Fraction is to nearest even."""

from fractions import Fraction

import numpy as np

from nearflash.model.attention.numerics.score import to_score


def objects(values):
    return np.array([*values, None], object)[:-1]


def test_equals_round():
    rng = np.random.default_rng(1)
    sums = [int(rng.integers(-(1 << 62), 1 << 62)) << 5 for _ in range(2_000)]
    sums += [k * (1 << 31) + step for k in range(-9, 10) for step in (-1, 0, 1)]
    score, outside = to_score(objects(sums))
    assert score.tolist() == [round(Fraction(one, 1 << 32)) for one in sums]
    assert not outside.any()


def test_range():
    most, least, half = (1 << 35) - 1, -(1 << 35), 1 << 31
    sums = [(most << 32) + step for step in (0, half - 1, half)] + [
        (least << 32) - step for step in (0, half, half + 1)
    ]
    score, outside = to_score(objects(sums))
    assert outside.tolist() == [False, False, True, False, False, True]
    assert score.tolist() == [most, most, least, least, least, most]
