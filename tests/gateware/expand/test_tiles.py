import numpy as np
import pytest

from nearflash.abi.topk import StreamFault, ValueFormat
from nearflash.sim.mutation import tiles
from nearflash.sim.ports import words_from_integers
from nearflash.sim.stalls import STALLS, Stall, Stalls
from nearflash.sim.streams import StreamUnit


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


def test_value_format_stands_until_the_next_command(unit):
    """It is that of the last command, not of one that waits."""
    starts = [form << 93 | StreamFault.HEADER << 95 for form in ValueFormat]
    inputs = {"i_start": words_from_integers(starts, 98)}
    found = unit.run(inputs, {"o_end": len(starts)}, stalls=Stalls(named={"o_end": Stall(90)}), seed=1)
    assert (found["o_end"] >> 3).tolist() == list(ValueFormat)
