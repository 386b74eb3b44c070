import pytest

from nearflash.gateware.fp.add import Add
from nearflash.model.fp.add import add
from nearflash.verify.fixtures.vectors import operands


@pytest.fixture(scope="module")
def unit(fp_unit):
    return fp_unit(Add())


def test_equals_the_model(unit, same):
    a, b = operands(400_000, 2, seed=21)
    same(unit, {"a": a, "b": b}, add(a, b))


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
