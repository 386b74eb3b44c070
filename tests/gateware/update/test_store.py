"""Store writes exactly the bytes of the parameters, and counts what it took."""

import random
from typing import Any

import pytest
from amaranth.sim import Simulator

from nearflash.gateware.update.store import OUTPUTS, Store

ADDRESSES = {"copy": 0x0FF0, "p": 0x0000, "m": 0x1020, "v": 0x0FD0}


def _results(params: int) -> list[dict[str, int]]:
    rng = random.Random(params)
    return [
        {"p": rng.getrandbits(32), "m": rng.getrandbits(32), "v": rng.getrandbits(32), "copy": rng.getrandbits(16),
         "nonfinite_gradient": rng.randint(0, 1), "copy_overflow": rng.randint(0, 1)}
        for _ in range(params)
    ]  # fmt: skip


def _store(small: Any, serve_writes: Any, params: int, copy: int, bad_page: int = -1) -> Any:
    store, results = Store(small), _results(params)
    memories = [bytearray(b"\xee" * 2 * 4096) for _ in OUTPUTS]
    counts = dict.fromkeys(("params", "nonfinite_gradients", "copy_overflows"), 0)
    errors = []

    async def command(ctx):  # type: ignore[no-untyped-def]
        ctx.set(store.i_command.payload, {"address": [ADDRESSES[n] for n in OUTPUTS], "params": params, "copy": copy})
        ctx.set(store.i_command.valid, 1)
        await ctx.tick().until(store.i_command.ready)
        ctx.set(store.i_command.valid, 0)

    async def feed(ctx):  # type: ignore[no-untyped-def]
        rng, lanes = random.Random(1), small.lanes
        garbage = {"p": 1, "m": 2, "v": 3, "copy": 4, "nonfinite_gradient": 1, "copy_overflow": 1}
        padded = [*results, *[garbage] * (-params % lanes)]
        for start in range(0, len(padded), lanes):
            await ctx.tick().repeat(rng.randint(1, 3))
            group = {"lanes": padded[start : start + lanes], "last": start + lanes >= params}
            ctx.set(store.i.payload, group)
            ctx.set(store.i.valid, 1)
            taken = (await ctx.tick().sample(store.counts).until(store.i.ready))[0]
            for name in counts:
                counts[name] += taken[name]
            ctx.set(store.i.valid, 0)
        await ctx.tick().repeat(2)
        await ctx.tick().until(store.idle)
        errors.extend((bool(ctx.get(e.seen)), ctx.get(e.address)) for e in store.error)

    sim = Simulator(store)
    sim.add_clock(1e-6)
    sim.add_testbench(command)
    sim.add_testbench(feed)
    for index, bus in enumerate(store.bus):
        sim.add_testbench(serve_writes(bus, memories[index], seed=index, bad_page=bad_page), background=True)
    sim.run()
    return results, memories, counts, errors


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("params", [1, 2, 3, 8, 15, 29])
def test_exactly_the_parameters_bytes_are_written(small: Any, serve_writes: Any, params: int, copy: int) -> None:
    results, memories, counts, errors = _store(small, serve_writes, params, copy)
    for name, memory in zip(OUTPUTS, memories, strict=True):
        want = bytearray(b"\xee" * len(memory))
        if name != "copy" or copy:
            size = 2 if name == "copy" else 4
            data = b"".join(result[name].to_bytes(size, "little") for result in results)
            want[ADDRESSES[name] : ADDRESSES[name] + len(data)] = data
        assert memory == want, name
    assert counts["params"] == params
    assert counts["nonfinite_gradients"] == sum(result["nonfinite_gradient"] for result in results)
    assert counts["copy_overflows"] == copy * sum(result["copy_overflow"] for result in results)
    assert not any(seen for seen, _ in errors)


def test_a_bus_error_is_kept_and_nothing_hangs(small: Any, serve_writes: Any) -> None:
    *_, errors = _store(small, serve_writes, 29, 1, bad_page=1)
    assert errors == [(True, 0x1000), (False, 0), (True, 0x1020), (True, 0x1000)]
