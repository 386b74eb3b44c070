"""Job queues against lists, with jobs that come and leave at random."""

import random

import pytest
from amaranth.sim import Simulator

from nearflash.gateware.nand.jobs import JobQueues


def test_equals_lists():
    luns, depth = 4, 4
    dut = JobQueues(luns, depth, 3)
    queues: list[list[int]] = [[] for _ in range(luns)]
    rng = random.Random(5)
    seen = {"full": 0, "popped": 0}

    async def drive(ctx):
        await ctx.tick().repeat(luns + 1)  # the clearing
        for _ in range(1500):
            lun, job = rng.randrange(luns), (rng.randrange(luns), rng.randrange(8))
            offers = rng.random() < 0.7
            ctx.set(dut.lun, lun)
            ctx.set(dut.i.valid, offers)
            ctx.set(dut.i.payload, {"lun": job[0], "slot": job[1]})
            queue = queues[lun]
            assert ctx.get(dut.some) == (len(queue) > 0)
            assert ctx.get(dut.i.ready) == (len(queues[job[0]]) < depth)
            taken = offers and ctx.get(dut.i.ready)
            seen["full"] += offers and not taken
            ctx.set(dut.pop, pops := bool(queue) and rng.random() < 0.5)
            ahead = queue[:2]
            await ctx.tick()
            # A job that came in the clock of the look is in none of the three.
            assert ctx.get(dut.more) == (len(ahead) > 1)
            assert [ctx.get(dut.first), ctx.get(dut.next)][: len(ahead)] == ahead
            if pops:
                queue.pop(0)
                seen["popped"] += 1
            if taken:
                queues[job[0]].append(job[1])

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    assert all(seen.values())


@pytest.mark.parametrize("depth", [0, 1, 6])
def test_depth_must_be_a_power_of_two(depth):
    with pytest.raises(ValueError, match=rf"^depth must be a power of two, at least 2, not {depth}$"):
        JobQueues(4, depth, 3)
