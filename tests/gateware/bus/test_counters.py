import random

import pytest
from amaranth.sim import Simulator

from nearflash.gateware.bus.counters import Counters


def test_counts_from_start_to_done_and_holds():
    dut = Counters({"beats": 3, "stalls": 1}, width_bits=16)
    rng = random.Random(5)
    sums = []

    async def testbench(ctx):
        for _ in range(3):
            ctx.set(dut.start, 1)
            ctx.set(dut.events.beats, 7)  # in the cycle of start: not counted
            await ctx.tick()
            ctx.set(dut.start, 0)
            beats, stalls = 0, 0
            for cycle in range(20):
                added = rng.randrange(8), rng.randrange(2)
                beats, stalls = beats + added[0], stalls + added[1]
                ctx.set(dut.events, {"beats": added[0], "stalls": added[1]})
                ctx.set(dut.done, cycle == 19)
                assert (ctx.get(dut.latched.beats), ctx.get(dut.latched.stalls)) == (sums[-1] if sums else (0, 0))
                await ctx.tick()
            ctx.set(dut.done, 0)
            await ctx.tick().repeat(Counters.LATENCY - 1)
            sums.append((beats, stalls))
            assert (ctx.get(dut.latched.beats), ctx.get(dut.latched.stalls)) == sums[-1]

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    assert len(sums) == 3


def test_counters_wrap():
    dut = Counters({"beats": 2}, width_bits=3)

    async def testbench(ctx):
        ctx.set(dut.events.beats, 3)
        await ctx.tick().repeat(2)
        ctx.set(dut.done, 1)
        await ctx.tick()
        ctx.set(dut.done, 0)
        await ctx.tick().repeat(Counters.LATENCY - 1)
        assert ctx.get(dut.latched.beats) == 9 % 8

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()


def test_increments_message():
    with pytest.raises(ValueError, match=r"increments must name at least one counter, not \{\}"):
        Counters({})


def test_increment_width_message():
    with pytest.raises(ValueError, match=r"increments\['beats'\] must be 1 to 8 bits, not 9"):
        Counters({"beats": 9}, width_bits=8)
