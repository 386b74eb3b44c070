import numpy as np
import pytest

from nearflash.gateware.attention.numerics.weight import ToWeight
from nearflash.model.attention.numerics.weight import to_weight

COUNT = 300_000


@pytest.fixture(scope="module")
def unit(num_unit):
    return num_unit(ToWeight())


def compare(unit, logit, reference):
    got = unit.run({"i": logit, "reference": reference})
    weight, over = to_weight(logit, reference)
    np.testing.assert_array_equal(got["o"], weight.view(np.uint16))
    np.testing.assert_array_equal(got["over"].astype(bool), over)
    np.testing.assert_array_equal(got["floor"], logit >> 16)


def test_equals_the_model(unit):
    rng = np.random.default_rng(1)
    reference = rng.integers(-2000, 2000, COUNT)
    compare(unit, ((reference + rng.integers(-40, 14, COUNT)) << 16) + rng.integers(0, 1 << 16, COUNT), reference)


def test_any_logit_and_reference(unit):
    rng = np.random.default_rng(2)
    reference, logit = rng.integers(-2048, 2048, COUNT), rng.integers(-(1 << 27), 1 << 27, COUNT)
    reference[:4], logit[:4] = [-2048, 2047, -2048, 2047], [(1 << 27) - 1, -(1 << 27), -(1 << 27), (1 << 27) - 1]
    compare(unit, logit, reference)


def test_every_fraction_where_rounding_matters(unit):
    fraction = np.arange(1 << 16)
    for floor in (-33, -32, -31, -26, -22, -21, 7, 8, 9):
        compare(unit, (floor << 16) + fraction, np.zeros(1 << 16, np.int64))


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
