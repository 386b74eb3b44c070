import numpy as np
import pytest

from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit
from nearflash.verify.units.gradients.tiles import vectors as tiles


@pytest.fixture(scope="module")
def unit():
    return StreamUnit(tiles.ObservedTiles(), "tile-check")


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("seed", [1, 2])
def test_equals_the_contract(unit, stalls, seed):
    """Sections go to their queues and good tiles are released; the first fault is named and ends that."""
    inputs, expected = tiles.vectors(np.random.default_rng(seed))
    found = unit.run(inputs, {name: len(items) for name, items in expected.items()}, stalls=stalls, seed=seed)
    for name, items in expected.items():
        np.testing.assert_array_equal(found[name], items)
