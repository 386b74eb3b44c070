import numpy as np
import pytest

from nearflash.gateware.attention.numerics.score import ToScore
from nearflash.model.attention.numerics.score import to_score
from nearflash.sim.verilator.ports import words_from_integers

BITS = 90


@pytest.fixture(scope="module")
def unit(num_unit):
    return num_unit(ToScore())


def test_equals_the_model(unit):
    rng = np.random.default_rng(1)
    shifts = rng.integers(6, 96, 20_000).tolist()
    sums = [int.from_bytes(rng.bytes(12), "little", signed=True) >> shift for shift in shifts]
    sums += [k * (1 << 31) + step for k in range(-9, 10) for step in (-1, 0, 1)]
    edge = 1 << 67
    sums += [sign * edge + k * (1 << 31) + step for sign in (-1, 1) for k in range(-4, 5) for step in (-1, 0, 1)]
    sums += [sign * (1 << k) for sign in (-1, 1) for k in range(89)]
    got = unit.run({"i": words_from_integers(sums, BITS)})
    score, outside = to_score(np.array(sums, object))
    np.testing.assert_array_equal(got["o"], score)
    np.testing.assert_array_equal(got["outside"].astype(bool), outside)


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
