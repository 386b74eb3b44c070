"""Common parts of cocotb testbenches: the test decorator with its timeout, clock and reset, stream drivers.

A testbench module has a function `component(**parameters)` that makes the Amaranth component, and tests decorated
with `test`. It runs inside the simulator; `nearflash.verify.cocotb.run` starts it.
"""

import json
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, ReadOnly, RisingEdge

from nearflash.sim.stalls import Stall

__all__ = ["CLOCK_NS", "parameters", "receive", "send", "start", "test"]

#: Clock period of every testbench.
CLOCK_NS = 10


def test(timeout_cycles: int = 100_000) -> Callable[[Any], Any]:
    """`cocotb.test` that fails after `timeout_cycles`: an untimed test of a hung design would never end."""
    return cocotb.test(timeout_time=timeout_cycles * CLOCK_NS, timeout_unit="ns")


def parameters() -> dict[str, Any]:
    """The parameters that `component` was made with."""
    return json.loads(os.environ.get("NEARFLASH_PARAMETERS", "{}"))


async def start(dut: Any) -> None:
    """Start the clock and hold the reset for three cycles; every `valid` and `ready` input is low."""
    for name in json.loads(os.environ["NEARFLASH_INPUTS"]):
        if name.endswith(("valid", "ready")):
            getattr(dut, name).value = 0
    Clock(dut.clk, CLOCK_NS, unit="ns").start()
    dut.rst.value = 1
    await ClockCycles(dut.clk, 3)
    dut.rst.value = 0


async def send(dut: Any, stream: str, items: Sequence[int], stall: Stall | None = None, seed: int = 0) -> None:
    """Send `items` into the input stream of that name."""
    payload, valid, ready = (getattr(dut, f"{stream}__{part}") for part in ("payload", "valid", "ready"))
    stalled = (stall or Stall()).cycles(random.Random(seed))
    for item in items:
        while next(stalled):
            await RisingEdge(dut.clk)
        payload.value, valid.value = item, 1
        taken = False
        while not taken:
            await ReadOnly()
            taken = bool(ready.value)
            await RisingEdge(dut.clk)
        valid.value = 0


async def receive(dut: Any, stream: str, count: int, stall: Stall | None = None, seed: int = 0) -> list[int]:
    """Take `count` items from the output stream of that name."""
    payload, valid, ready = (getattr(dut, f"{stream}__{part}") for part in ("payload", "valid", "ready"))
    stalled = (stall or Stall()).cycles(random.Random(seed))
    items: list[int] = []
    while len(items) < count:
        is_ready = not next(stalled)
        ready.value = is_ready
        await ReadOnly()
        if is_ready and valid.value:
            items.append(int(payload.value))
        await RisingEdge(dut.clk)
    ready.value = 0
    return items
