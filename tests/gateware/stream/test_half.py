import random

import pytest

from nearflash.gateware.stream.half import HalfBuffer
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

ITEMS = [random.Random(1).getrandbits(32) for _ in range(200)]


@pytest.mark.parametrize("stalls", STALLS)
def test_items_leave_in_order(stalls):
    assert run_streams(HalfBuffer(32), {"i": ITEMS}, {"o": len(ITEMS)}, stalls=stalls)["o"] == ITEMS


def test_an_item_every_two_cycles():
    cycles = transfer_cycles(HalfBuffer(32), {"i": ITEMS}, {"o": len(ITEMS)})["o"]
    assert cycles == list(range(cycles[0], cycles[0] + 2 * len(ITEMS), 2))


def test_latency():
    assert measure_latency(HalfBuffer(8), {"i": [1]}) == HalfBuffer.LATENCY
