"""cocotb testbench of nearflash.gateware.bus.read, against cocotbext-axi's memory."""

import random
from itertools import repeat
from typing import Any

import cocotb
from cocotbext.axi import AxiRamRead, AxiReadBus

from nearflash.gateware.bus.read import BurstReader
from nearflash.sim.stalls import Stall
from nearflash.sim.testbench import receive, send, start, test


def component() -> BurstReader:
    """64-bit beats, bursts of up to 16 beats, 4 under way."""
    return BurstReader(64, max_outstanding=4, max_burst_bytes=128)


@test()
async def reads_what_memory_holds(dut: Any) -> None:
    """Commands of many lengths from unaligned-to-burst addresses, with a slave and a consumer that pause."""
    await start(dut)
    dut.clear.value = 0
    memory = AxiRamRead(AxiReadBus.from_prefix(dut, "bus_"), dut.clk, dut.rst, size=1 << 14)
    rng = random.Random(2)
    contents = rng.randbytes(1 << 14)
    memory.write(0, contents)
    memory.ar_channel.set_pause_generator(bool(rng.random() < 0.5) for _ in repeat(0))
    memory.r_channel.set_pause_generator(bool(rng.random() < 0.5) for _ in repeat(0))
    commands = [(8 * rng.randrange(0, 1500), rng.randrange(0, 60)) for _ in range(12)]
    expected = [contents[address + 8 * beat :][:8] for address, beats in commands for beat in range(beats)]
    sender = cocotb.start_soon(send(dut, "i_command", [address | beats << 64 for address, beats in commands]))
    received = await receive(dut, "o", len(expected), Stall(50), seed=3)
    assert [beat.to_bytes(8, "little") for beat in received] == expected
    await sender
