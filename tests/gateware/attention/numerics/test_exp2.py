import numpy as np
import pytest

from nearflash.gateware.attention.numerics.exp2 import Exp2
from nearflash.model.attention.numerics.exp2 import significand


@pytest.fixture(scope="module")
def unit(num_unit):
    return num_unit(Exp2())


def test_every_fraction_equals_the_model(unit):
    fraction = np.random.default_rng(1).permutation(1 << 16)
    np.testing.assert_array_equal(unit.run({"i": fraction})["o"], significand(fraction))


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
