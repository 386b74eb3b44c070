"""The master writer writes exactly the bytes of the parameters: p, or its weights and its rests."""

import random
from typing import Any

import pytest
from amaranth.sim import Simulator

from nearflash.gateware.update.master_writer import MasterWriter


def _write(config: Any, serve_writes: Any, commands: Any, bad_page: int = -1) -> tuple[bytearray, Any, Any]:
    """Memory after commands (params, split, address of p or the weights, that of the rests), parameters, the error."""
    writer, memory, errors = MasterWriter(config), bytearray(b"\xee" * 3 * 4096), []
    rng, lanes = random.Random(1), config.lanes
    results = [[(rng.getrandbits(32), rng.getrandbits(16)) for _ in range(params)] for params, *_ in commands]

    async def run(ctx):  # type: ignore[no-untyped-def]
        for (params, split, address, rest_address), values in zip(commands, results, strict=True):
            command = {"address": address, "rest_address": rest_address, "params": params, "split": split}
            ctx.set(writer.i_command.payload, command)
            ctx.set(writer.i_command.valid, 1)
            await ctx.tick().until(writer.i_command.ready)
            ctx.set(writer.i_command.valid, 0)
            for start in range(0, params, lanes):
                group = values[start : start + lanes]
                await ctx.tick().repeat(rng.randint(1, 3))
                ctx.set(writer.i.payload, {
                    "p": sum(p << 32 * lane for lane, (p, _) in enumerate(group)),
                    "weights": sum(weight << 16 * lane for lane, (_, weight) in enumerate(group)),
                    "strb": (1 << len(group)) - 1,
                    "last": start + lanes >= params,
                })  # fmt: skip
                ctx.set(writer.i.valid, 1)
                await ctx.tick().until(writer.i.ready)
                ctx.set(writer.i.valid, 0)
            await ctx.tick().repeat(2)
            await ctx.tick().until(writer.idle)
        errors.append((ctx.get(writer.error.seen), ctx.get(writer.error.address)))

    sim = Simulator(writer)
    sim.add_clock(1e-6)
    sim.add_testbench(run)
    sim.add_testbench(serve_writes(writer.bus, memory, seed=1, bad_page=bad_page), background=True)
    sim.run()
    return memory, results, errors[0]


def test_the_parameters_bytes_and_no_others_are_written(split: Any, serve_writes: Any) -> None:
    half = split.port_bytes // 2
    kinds = [(1, 1), (40, 1), (33, 0), (7, 1), (2, 0), (64, 1)]
    commands = [(params, kind, 0x800 * n + 2 * half + (half if kind and n % 2 else 0), 0x800 * n + 0x400 + half)
                for n, (params, kind) in enumerate(kinds)]  # fmt: skip
    memory, results, error = _write(split, serve_writes, commands)
    want = bytearray(b"\xee" * len(memory))
    for (_, kind, address, rest_address), values in zip(commands, results, strict=True):
        for n, (p, weight) in enumerate(values):
            if kind:
                want[address + 2 * n : address + 2 * n + 2] = weight.to_bytes(2, "little")
                want[rest_address + 2 * n : rest_address + 2 * n + 2] = (p & 0xFFFF).to_bytes(2, "little")
            else:
                want[address + 4 * n : address + 4 * n + 4] = p.to_bytes(4, "little")
    assert memory == want
    assert error == (0, 0)


@pytest.mark.parametrize(("address", "rest_address", "seen"), [(4096, 0, 4096), (0, 4096 + 64, 4096 + 64), (0, 64, 0)])
def test_either_writers_error_is_kept(
    split: Any, serve_writes: Any, address: int, rest_address: int, seen: int
) -> None:
    *_, error = _write(split, serve_writes, [(16, 1, address, rest_address)], bad_page=1)
    assert error == (seen > 0, seen)
