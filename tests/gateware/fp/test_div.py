import pytest

from nearflash.gateware.fp.div import Div
from nearflash.model.fp.div import div
from nearflash.verify.fixtures.vectors import operands


@pytest.fixture(scope="module")
def unit(fp_unit):
    return fp_unit(Div())


def test_equals_the_model(unit, same):
    a, b = operands(400_000, 2, seed=23)
    same(unit, {"a": a, "b": b}, div(a, b))


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
