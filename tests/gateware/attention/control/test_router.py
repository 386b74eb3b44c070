import dataclasses
import random

import pytest
from amaranth.sim import Simulator

from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.router import RequestRouter
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS

CONFIG = dataclasses.replace(CONFIGS["attend-zynq7045"], channels=3)


@pytest.mark.parametrize("stalls", STALLS)
def test_requests_reach_their_destination_in_order(stalls):
    rng = random.Random(3)
    walkers = [
        [
            {"channel": rng.randrange(3), "request": {"context": w, "index": k, "memory": rng.random() < 0.3}}
            for k in range(30)
        ]
        for w in range(2)
    ]

    def at(destination):
        return [
            [r for r in walker if (3 if r["request"]["memory"] else r["channel"]) == destination] for walker in walkers
        ]

    expected = {f"o__{n}": [[r["request"] for r in part] for part in at(n)] for n in range(3)}
    expected["o_memory"] = at(3)
    got = run_streams(
        RequestRouter(CONFIG),
        {f"i__{w}": walker for w, walker in enumerate(walkers)},
        {name: sum(map(len, parts)) for name, parts in expected.items()},
        stalls=stalls,
    )
    for name, parts in expected.items():
        requests = [item.request if name == "o_memory" else item for item in got[name]]
        split = [[got[name][k] for k, r in enumerate(requests) if r.context == walker] for walker in range(2)]
        assert split == parts


def test_a_channel_without_room_holds_only_requests_for_it():
    dut = RequestRouter(CONFIG)

    async def bench(ctx):
        for walker in range(2):
            ctx.set(dut.i[walker].valid, 1)
            ctx.set(dut.i[walker].payload.channel, walker)
        ctx.set(dut.o[1].ready, 1)
        moved = 0
        for _ in range(4 * RequestRouter.PLACES):
            *_, valid, ready = await ctx.tick().sample(dut.o[1].valid, dut.i[0].ready)
            moved += valid
        assert not ready
        assert moved > 3 * RequestRouter.PLACES

    simulate(dut, bench)


@pytest.mark.parametrize("hurry", [0, 1])
def test_while_others_hurry_a_walker_goes_last_and_takes_few_places(hurry):
    dut = RequestRouter(CONFIG, yields=1)

    async def bench(ctx):
        ctx.set(dut.hurry, hurry)
        ctx.set(dut.i[1].valid, 1)  # fills its channel, as far as it may
        await ctx.tick().repeat(2 * RequestRouter.PLACES)
        for index, request in enumerate(({"context": 5}, {"context": 6, "memory": 1})):
            ctx.set(dut.i[index].payload.request, request)
        ctx.set(dut.i[0].valid, 1)
        await ctx.tick().repeat(2 * RequestRouter.PLACES)
        for walker in range(2):
            ctx.set(dut.i[walker].valid, 0)
        ctx.set(dut.o[0].ready, 1)
        contexts = []
        for _ in range(2 * RequestRouter.PLACES):
            *_, valid, context = await ctx.tick().sample(dut.o[0].valid, dut.o[0].payload.context)
            contexts += [int(context)] * valid
        before = contexts.index(5)
        assert (before == RequestRouter.YIELDED) if hurry else (before >= RequestRouter.PLACES)
        assert set(contexts[:before]) == {0}

    simulate(dut, bench)


def simulate(dut, bench):
    simulation = Simulator(dut)
    simulation.add_clock(1e-6)
    simulation.add_testbench(bench)
    simulation.run()
