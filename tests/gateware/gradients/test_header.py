import numpy as np
import pytest

from nearflash.gateware.gradients.header import HeaderCheck
from nearflash.sim.pysim.harness import measure_latency
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit
from nearflash.verify.units.gradients import header


@pytest.fixture(scope="module")
def unit():
    return StreamUnit(header.ObservedHeader(), "header-check")


@pytest.mark.parametrize("stalls", STALLS)
def test_equals_the_contract(unit, stalls):
    """Good headers pass their words, bad ones are named; each command takes its words and no others."""
    inputs, expected = header.vectors(np.random.default_rng(1))
    found = unit.run(inputs, {name: len(items) for name, items in expected.items()}, stalls=stalls, seed=1)
    for name, items in expected.items():
        np.testing.assert_array_equal(found[name], items)


def test_latency():
    inputs, _ = header.vectors(np.random.default_rng(1))
    given = {"i_command": inputs["i_command"][-1:].tolist(), "i": inputs["i"][-24:-20].tolist()}
    assert measure_latency(header.ObservedHeader(), given, o="o_start") == HeaderCheck.LATENCY
