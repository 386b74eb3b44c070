import pytest

from nearflash.gateware.fp.mul import Mul
from nearflash.model.fp.mul import mul
from nearflash.verify.fixtures.vectors import operands


@pytest.fixture(scope="module")
def unit(fp_unit):
    return fp_unit(Mul())


def test_equals_the_model(unit, same):
    a, b = operands(400_000, 2, seed=22)
    same(unit, {"a": a, "b": b}, mul(a, b))


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
