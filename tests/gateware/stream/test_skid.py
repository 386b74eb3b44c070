import random

import pytest

from nearflash.gateware.stream.skid import SkidBuffer
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

ITEMS = [random.Random(1).getrandbits(32) for _ in range(200)]


@pytest.mark.parametrize("stalls", STALLS)
def test_items_leave_in_order(stalls):
    assert run_streams(SkidBuffer(32), {"i": ITEMS}, {"o": len(ITEMS)}, stalls=stalls)["o"] == ITEMS


def test_one_item_a_cycle():
    cycles = transfer_cycles(SkidBuffer(32), {"i": ITEMS}, {"o": len(ITEMS)})["o"]
    assert cycles == list(range(cycles[0], cycles[0] + len(ITEMS)))


def test_latency():
    assert measure_latency(SkidBuffer(8), {"i": [1]}) == SkidBuffer.LATENCY
