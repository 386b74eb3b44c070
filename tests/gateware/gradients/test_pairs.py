import numpy as np
import pytest

from nearflash.gateware.gradients.pairs import PairMerge
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit
from nearflash.verify.units.gradients.pairs import vectors as pairs


@pytest.fixture(scope="module")
def unit():
    return StreamUnit(pairs.ObservedMerge(), "pair-merge")


@pytest.mark.parametrize("stalls", STALLS)
def test_equals_the_contract(unit, stalls):
    """Groups of dense values; those behind a failure are zero, and nothing of it shows in the next command."""
    inputs, expected = pairs.vectors(np.random.default_rng(4))
    found = unit.run(inputs, {"o": len(expected["o"])}, stalls=stalls, seed=1)
    np.testing.assert_array_equal(found["o"], expected["o"])


def test_messages():
    with pytest.raises(ValueError, match="lanes must be 1, 2 or 4, not 3"):
        PairMerge(3)
