"""A build small enough for Amaranth's simulator, and AXI slaves for it."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nearflash.abi.kernel.config import UpdateConfig

SMALL = UpdateConfig("small", lanes=2, port_bits=128, outstanding_bursts=2, burst_bytes=64, clock_hz=1)


# The slaves still wait when their simulator is collected. Amaranth's `until` and `repeat` complain then, a single tick
# does not.


async def _ticks(ctx: Any, cycles: int) -> None:
    for _ in range(cycles):
        await ctx.tick()


async def _until(ctx: Any, condition: Any, *values: Any) -> list[int]:
    """What `values` are at the first clock edge where `condition` holds."""
    while True:
        _, _, holds, *sampled = await ctx.tick().sample(condition, *values)
        if holds:
            return sampled


@pytest.fixture
def small() -> UpdateConfig:
    """Two lanes, 128-bit ports, bursts of 4 beats."""
    return SMALL


@pytest.fixture
def narrow() -> UpdateConfig:
    """The same with narrow state formats."""
    return replace(SMALL, state_formats=("fp32", "bf16", "mx8"))


@pytest.fixture(params=[1, 2, 4])
def split(request: Any) -> UpdateConfig:
    """The same with split masters, of one, two and four lanes."""
    return replace(SMALL, lanes=request.param, port_bits=max(128, 64 * request.param), masters=("fp32", "split"))


@pytest.fixture
def serve_reads() -> Callable[..., Any]:
    """A read slave as a testbench: bytes from `memory`, random pauses, SLVERR in the page `bad_page`."""

    def make(bus: Any, memory: bytes, seed: int, bad_page: int = -1) -> Any:
        async def serve(ctx: Any) -> None:
            rng, beat_bytes = random.Random(seed), len(bus.rdata) // 8
            while True:
                ctx.set(bus.arready, 1)
                address, length = await _until(ctx, bus.arvalid, bus.araddr, bus.arlen)
                ctx.set(bus.arready, 0)
                for beat in range(length + 1):
                    await _ticks(ctx, rng.randint(1, 3))
                    start = address + beat * beat_bytes
                    ctx.set(bus.rdata, int.from_bytes(memory[start : start + beat_bytes], "little"))
                    ctx.set(bus.rresp, 2 if start // 4096 == bad_page else 0)
                    ctx.set(bus.rlast, beat == length)
                    ctx.set(bus.rvalid, 1)
                    await _until(ctx, bus.rready)
                    ctx.set(bus.rvalid, 0)

        return serve

    return make


@pytest.fixture
def serve_writes() -> Callable[..., Any]:
    """A write slave as a testbench: strobed bytes go to `memory`, random pauses, SLVERR in the page `bad_page`."""

    def make(bus: Any, memory: bytearray, seed: int, bad_page: int = -1) -> Any:
        async def serve(ctx: Any) -> None:
            rng, beat_bytes = random.Random(seed), len(bus.wstrb)
            while True:
                ctx.set(bus.awready, 1)
                address, length = await _until(ctx, bus.awvalid, bus.awaddr, bus.awlen)
                ctx.set(bus.awready, 0)
                for beat in range(length + 1):
                    await _ticks(ctx, rng.randint(1, 3))
                    ctx.set(bus.wready, 1)
                    data, strb, last = await _until(ctx, bus.wvalid, bus.wdata, bus.wstrb, bus.wlast)
                    ctx.set(bus.wready, 0)
                    assert last == (beat == length)
                    for byte in range(beat_bytes):
                        if strb >> byte & 1:
                            memory[address + beat * beat_bytes + byte] = data >> 8 * byte & 0xFF
                ctx.set(bus.bresp, 2 if address // 4096 == bad_page else 0)
                ctx.set(bus.bvalid, 1)
                await _until(ctx, bus.bready)
                ctx.set(bus.bvalid, 0)

        return serve

    return make
