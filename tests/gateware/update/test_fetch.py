"""Fetch gives every parameter's four words, in order, whatever the count and however the ports pause."""

import random
from typing import Any

import pytest
from amaranth.sim import Simulator

from nearflash.gateware.update.fetch import INPUTS, Fetch

ADDRESSES = {"g": 0x0000, "p": 0x1030, "m": 0x0FC0, "v": 0x2010}
MEMORY = random.Random(1).randbytes(3 * 4096)


def _word(name: str, index: int) -> int:
    start = ADDRESSES[name] + 4 * index
    return int.from_bytes(MEMORY[start : start + 4], "little")


def _fetch(
    small: Any, serve_reads: Any, params: int, bad_page: int = -1
) -> tuple[list[tuple[dict[str, int], bool]], Any]:
    fetch, groups, errors = Fetch(small), [], []

    async def command(ctx):  # type: ignore[no-untyped-def]
        addresses = [ADDRESSES[name] for name in INPUTS]
        ctx.set(fetch.i_command.payload, {"address": addresses, "params": params})
        ctx.set(fetch.i_command.valid, 1)
        await ctx.tick().until(fetch.i_command.ready)
        ctx.set(fetch.i_command.valid, 0)

    async def collect(ctx):  # type: ignore[no-untyped-def]
        rng, last = random.Random(params), 0
        while not last:
            await ctx.tick().repeat(rng.randint(1, 3))
            ctx.set(fetch.o.ready, 1)
            group = (await ctx.tick().sample(fetch.o.payload).until(fetch.o.valid))[0]
            ctx.set(fetch.o.ready, 0)
            last = group.last
            groups.extend(({name: lane[name] for name in INPUTS}, bool(last)) for lane in group.lanes)
        await ctx.tick().repeat(20)
        assert not ctx.get(fetch.o.valid)
        assert ctx.get(fetch.idle)
        errors.extend((bool(ctx.get(e.seen)), ctx.get(e.address)) for e in fetch.error)

    sim = Simulator(fetch)
    sim.add_clock(1e-6)
    sim.add_testbench(command)
    sim.add_testbench(collect)
    for index, bus in enumerate(fetch.bus):
        sim.add_testbench(serve_reads(bus, MEMORY, seed=index, bad_page=bad_page), background=True)
    sim.run()
    return groups, errors


@pytest.mark.parametrize("params", [1, 2, 3, 4, 5, 16, 31])
def test_groups_hold_the_parameters_in_order(small: Any, serve_reads: Any, params: int) -> None:
    groups, errors = _fetch(small, serve_reads, params)
    assert [words for words, _ in groups[:params]] == [
        {name: _word(name, index) for name in INPUTS} for index in range(params)
    ]
    assert len(groups) == -(-params // small.lanes) * small.lanes
    assert [last for _, last in groups] == [False] * (len(groups) - small.lanes) + [True] * small.lanes
    assert not any(seen for seen, _ in errors)


def test_a_bus_error_is_kept_and_nothing_hangs(small: Any, serve_reads: Any) -> None:
    groups, errors = _fetch(small, serve_reads, 40, bad_page=1)
    assert len(groups) == 40
    assert errors == [(False, 0), (True, 0x1030), (True, 0x1000), (False, 0)]
