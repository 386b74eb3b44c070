import numpy as np
import pytest

from nearflash.gateware.fp.sqrt import Sqrt
from nearflash.model.fp.sqrt import sqrt
from nearflash.verify.fixtures.vectors import operands


@pytest.fixture(scope="module")
def unit(fp_unit):
    return fp_unit(Sqrt())


def test_equals_the_model(unit, same):
    (a,) = operands(400_000, 1, seed=24)
    same(unit, {"a": a}, sqrt(a))


def test_squares_and_their_neighbours(unit, same):
    roots = np.random.default_rng(25).integers(1, 4096, 20_000).astype(np.float32)
    squares = (roots * roots).view(np.uint32)
    a = np.concatenate([squares, squares - np.uint32(1), squares + np.uint32(1)])
    same(unit, {"a": a}, sqrt(a))


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
