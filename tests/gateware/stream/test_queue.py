import random

import pytest
from amaranth.lib import data

from nearflash.gateware.stream.queue import StreamQueue
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS, Stall, StallPattern

ITEMS = [random.Random(2).getrandbits(16) for _ in range(200)]
MEMORIES = ("distributed", "block")


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_items_leave_in_order(memory, stalls):
    queue = StreamQueue(16, 5, memory=memory)
    assert run_streams(queue, {"i": ITEMS}, {"o": len(ITEMS)}, stalls=stalls)["o"] == ITEMS


@pytest.mark.parametrize("memory", MEMORIES)
def test_one_item_a_cycle(memory):
    cycles = transfer_cycles(StreamQueue(16, 4, memory=memory), {"i": ITEMS}, {"o": len(ITEMS)})["o"]
    assert cycles == list(range(cycles[0], cycles[0] + len(ITEMS)))


@pytest.mark.parametrize("memory", MEMORIES)
def test_latency(memory):
    assert measure_latency(StreamQueue(8, 4, memory=memory), {"i": [1]}) == StreamQueue.LATENCY[memory]


@pytest.mark.parametrize("memory", MEMORIES)
def test_holds_exactly_depth_items(memory):
    late = StallPattern(sink=Stall(99, burst_cycles=200))
    cycles = transfer_cycles(StreamQueue(8, 8, memory=memory), {"i": list(range(20))}, {"o": 20}, stalls=late, seed=3)
    held = [sum(i < now for i in cycles["i"]) - out for out, now in enumerate(cycles["o"])]
    assert max(held) == 8


def test_struct_payload():
    layout = data.StructLayout({"key": 8, "flag": 1})
    items = [{"key": key, "flag": key & 1} for key in range(20)]
    assert run_streams(StreamQueue(layout, 4), {"i": items}, {"o": 20})["o"] == items


def test_depth_message():
    with pytest.raises(ValueError, match="depth must be at least 2 items, not 1"):
        StreamQueue(8, 1)


def test_memory_message():
    with pytest.raises(ValueError, match=r"memory must be one of \('distributed', 'block'\), not 'ultra'"):
        StreamQueue(8, 4, memory="ultra")
