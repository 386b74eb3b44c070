"""cocotb testbench of nearflash.gateware.stream.queue."""

import random
from typing import Any

import cocotb
from cocotb.triggers import ClockCycles, ReadOnly

from nearflash.gateware.stream.queue import QueueMemory, StreamQueue
from nearflash.sim.stalls import STALLS
from nearflash.verify.cocotb.testbench import parameters, receive, send, start, test


def component(memory: QueueMemory = "distributed", depth: int = 5) -> StreamQueue:
    """A queue of 32-bit items."""
    return StreamQueue(32, depth, memory=memory)


@test()
async def items_leave_in_order(dut: Any) -> None:
    """Random items under every stall pattern."""
    await start(dut)
    rng = random.Random(1)
    for seed, pattern in enumerate(STALLS.values()):
        items = [rng.getrandbits(32) for _ in range(200)]
        sender = cocotb.start_soon(send(dut, "i", items, pattern.source, seed))
        assert await receive(dut, "o", len(items), pattern.sink, seed) == items
        await sender


@test()
async def it_holds_depth_items(dut: Any) -> None:
    """Exactly `depth` items go in while nothing is taken out, and `level` counts them."""
    await start(dut)
    depth = parameters().get("depth", 5)
    cocotb.start_soon(send(dut, "i", range(depth + 1)))
    await ClockCycles(dut.clk, depth + 5)
    await ReadOnly()
    assert (int(dut.level.value), int(dut.i__ready.value)) == (depth, 0)


@test()
async def reset_empties_it(dut: Any) -> None:
    """Items inside at a reset are gone."""
    await start(dut)
    await send(dut, "i", [1, 2, 3])
    dut.rst.value = 1
    await ClockCycles(dut.clk, 2)
    dut.rst.value = 0
    sender = cocotb.start_soon(send(dut, "i", [7]))
    assert await receive(dut, "o", 1) == [7]
    await sender
