"""Keys and dithers are the model's, wherever a command begins and whatever it drops."""

import random
from typing import Any

import numpy as np
import pytest
from amaranth.sim import Simulator

from nearflash.abi.optimizers.state import TILE_PARAMS, dither_key
from nearflash.gateware.update.dither import Dither
from nearflash.gateware.update.dither_keys import DitherKeys
from nearflash.model.update.state import dither


def first_items(unit: Any, commands: Any, busy: float = 0) -> tuple[list[Any], list[int]]:
    """Items of an endless stream behind the last of `commands`, and the cycle of each, counted from that command.

    A command is a mapping and how many cycles or, of the last one, items follow it; `busy`: share of cycles in which
    nobody takes an item.
    """
    items, cycles, rng = [], [], random.Random(1)

    async def drive(ctx):  # type: ignore[no-untyped-def]
        for index, (command, count) in enumerate(commands):
            ctx.set(unit.i_command.payload, command)
            ctx.set(unit.i_command.valid, 1)
            ctx.set(unit.o.ready, 0)
            await ctx.tick()
            ctx.set(unit.i_command.valid, 0)
            last, cycle = index == len(commands) - 1, 0
            while (len(items) if last else cycle) < count:
                cycle += 1
                ctx.set(unit.o.ready, rng.random() >= busy)
                if last and ctx.get(unit.o.valid) and ctx.get(unit.o.ready):
                    item = ctx.get(unit.o.payload)
                    items.append(item if isinstance(item, int) else [int(number) for number in item])
                    cycles.append(cycle)
                await ctx.tick()

    sim = Simulator(unit)
    sim.add_clock(1e-6)
    sim.add_testbench(drive)
    sim.run()
    return items, cycles


@pytest.mark.parametrize("role", ["m", "v"])
@pytest.mark.parametrize(("step", "tile"), [(1, 0), (7, 1000), (0xFFFF_FFFF, (1 << 27) - 20), (1 << 31, 12345)])
def test_keys_equal_the_model(role, step, tile):
    keys, cycles = first_items(DitherKeys(role), [({"step": step, "tile": tile}, 30)])
    assert keys == [dither_key(step, role, tile + n) for n in range(30)]
    assert cycles == [DitherKeys.LATENCY + n * DitherKeys.INTERVAL for n in range(30)]


@pytest.mark.parametrize("busy", [0, 0.4])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("first_param", [0, 8192 * 5 - 64, 8192 * 5 - 1, 8192 * 7 - 3, (1 << 40) - 8192 + 5])
def test_dithers_equal_the_model(lanes, first_param, busy):
    found, _ = first_items(Dither(lanes, "v"), [({"step": 77, "first_param": first_param}, 100)], busy)
    assert found == dither("v", 77, first_param, lanes * 100).reshape(-1, lanes).tolist()


def test_a_whole_tile_at_one_group_a_cycle():
    """The next key is there when its tile begins, so that no cycle is lost."""
    count, first = TILE_PARAMS // 4 + 100, TILE_PARAMS * 9 + 2
    found, cycles = first_items(Dither(4, "m"), [({"step": 3, "first_param": first}, count)])
    assert cycles == list(range(Dither.LATENCY, Dither.LATENCY + count))
    assert found == dither("m", 3, first, 4 * count).reshape(-1, 4).tolist()


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.full)])
def test_a_command_drops_what_is_left(stride):
    """Whatever the one before was at: mixing, waiting, giving groups."""
    rng = np.random.default_rng(1)
    for pause in range(0, 45, stride):
        commands = [({"step": int(rng.integers(1, 99)), "first_param": int(rng.integers(1 << 20))}, n)
                    for n in (pause, 30)]  # fmt: skip
        last = commands[-1][0]
        found, _ = first_items(Dither(2, "m"), commands, 0.2)
        assert found == dither("m", last["step"], last["first_param"], 60).reshape(-1, 2).tolist(), pause
