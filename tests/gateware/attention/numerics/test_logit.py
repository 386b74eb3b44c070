import numpy as np
import pytest

from nearflash.gateware.attention.numerics.logit import ToLogit
from nearflash.model.attention.numerics.logit import to_logit

COUNT = 200_000


@pytest.fixture(scope="module")
def unit(num_unit):
    return num_unit(ToLogit())


def compare(unit, score, scale):
    got = unit.run({"i": score, "scale": scale.view(np.uint32)})
    logit, outside = to_logit(score, scale)
    np.testing.assert_array_equal(got["o"], logit)
    np.testing.assert_array_equal(got["outside"].astype(bool), outside)
    return outside


def test_equals_the_model(unit):
    rng = np.random.default_rng(1)
    score = rng.integers(-(1 << 35), 1 << 35, COUNT) >> rng.integers(0, 36, COUNT)
    scale = np.ldexp(rng.random(COUNT) + 1, rng.integers(-14, 8, COUNT)).astype(np.float32)
    assert 0.1 < compare(unit, score, scale).mean() < 0.9


def test_ties_and_ends(unit):
    rng = np.random.default_rng(2)
    score = np.concatenate([rng.integers(-64, 64, COUNT // 2), (1 << 27) + rng.integers(-64, 64, COUNT // 2)])
    score = np.where(rng.integers(0, 2, COUNT) == 0, -score, score)
    halvings = rng.integers(0, 8, COUNT)
    score = np.where(rng.integers(0, 2, COUNT) == 0, score << halvings, score)
    score[:2] = -(1 << 35), (1 << 35) - 1
    scale = (rng.choice([1.0, 1.5, 1.25, 2 - 2.0**-23], COUNT) * 2.0**-halvings).astype(np.float32)
    compare(unit, score, scale)


def test_rounding_into_and_out_of_the_range(unit):
    score = np.add.outer([-(1 << 28), 1 << 28], np.arange(-9, 10)).ravel()
    outside = compare(unit, score, np.full(len(score), 0.5, np.float32))
    assert 0 < outside.sum() < len(score)


def test_scales_outside_their_range(unit):
    rng = np.random.default_rng(3)
    scale = rng.integers(0, 1 << 32, COUNT, dtype=np.uint32)
    edges = np.array([2.0**-14, 256, -1], np.float32).view(np.uint32)
    scale[: 3 * len(edges)] = np.concatenate([edges, edges - np.uint32(1), edges + np.uint32(1)])
    score = rng.integers(-(1 << 20), 1 << 20, COUNT)
    compare(unit, score, scale.view(np.float32))


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
