"""cocotb testbench of nearflash.gateware.top.update: cocotbext-axi drives the registers and is the memory."""

import itertools
import mmap
import random
from typing import Any

import cocotb
import numpy as np
from cocotb.triggers import ClockCycles, First, RisingEdge
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiRam

from nearflash.abi.adam import AdamStep, Profile
from nearflash.abi.commands import CopyFormat, Status, UpdateCommand
from nearflash.abi.config import update_config
from nearflash.abi.registers import MAGIC, UPDATE
from nearflash.gateware.top.update import UpdateKernel
from nearflash.model.update.lane import adam_step
from nearflash.sim.testbench import start, test

_MEMORY_BYTES = 1 << 20
_BASE = {"g": 0x10000, "p": 0x20000, "m": 0x30000, "v": 0x40000, "copy": 0x50000}


def component() -> UpdateKernel:
    """The tiny configuration."""
    return UpdateKernel(update_config("update-tiny"))


class Bench:
    """The kernel with a register master and one memory behind all ports."""

    def __init__(self, dut: Any) -> None:
        self.dut = dut
        self.registers = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axi_control_"), dut.clk, dut.rst)
        memory = mmap.mmap(-1, _MEMORY_BYTES)
        self.ports = [
            AxiRam(AxiBus.from_prefix(dut, f"m_axi_gmem{k}_"), dut.clk, dut.rst, size=_MEMORY_BYTES, mem=memory)
            for k in range(4)
        ]
        self.memory = self.ports[0]

    def pause(self, seed: int) -> None:
        """Make every channel of every port pause at random."""
        for index, port in enumerate(self.ports):
            channels = (port.write_if.aw_channel, port.write_if.w_channel, port.write_if.b_channel,
                        port.read_if.ar_channel, port.read_if.r_channel)  # fmt: skip
            for offset, channel in enumerate(channels):
                rng = random.Random(100 * seed + 10 * index + offset)
                channel.set_pause_generator(rng.random() < 0.4 for _ in itertools.count())

    async def write(self, name: str, value: int) -> None:
        """Write a register by name."""
        for word in range(UPDATE[name].width_bits // 32):
            await self.registers.write_dword(UPDATE[name].offset + 4 * word, value >> 32 * word & 0xFFFFFFFF)

    async def read(self, name: str) -> int:
        """Read a register by name."""
        words = [
            await self.registers.read_dword(UPDATE[name].offset + 4 * k) for k in range(UPDATE[name].width_bits // 32)
        ]
        return sum(word << 32 * k for k, word in enumerate(words))

    async def update(self, command: UpdateCommand) -> None:
        """Run a command to its interrupt."""
        for name, value in command.registers().items():
            await self.write(name, value)
        await self.write("interrupt_enable", 1)
        await self.write("interrupt_mask", 1)
        await self.write("control", 1)
        done = RisingEdge(self.dut.interrupt)
        assert await First(done, ClockCycles(self.dut.clk, 20_000)) is done, "no interrupt"
        assert await self.read("control") & 0b10, "ap_done must be set"
        await self.write("interrupt_status", 1)


def _state(params: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    state = {name: rng.standard_normal(params).astype(np.float32) for name in ("g", "p", "m", "v")}
    state["v"] = np.square(state["v"])
    return state


@test(timeout_cycles=60_000)
async def equals_the_model_while_channels_pause(dut: Any) -> None:
    """Every profile and copy, tails of all kinds, in place."""
    await start(dut)
    bench = Bench(dut)
    bench.pause(seed=1)
    copies = itertools.cycle(CopyFormat)
    for params, profile in itertools.product((1, 2, 77), Profile):
        adam, copy = AdamStep(lr=1e-3, step=5, weight_decay=0.1, profile=profile), next(copies)
        state = _state(params, seed=params)
        for name, values in state.items():
            bench.memory.write(_BASE[name], values.tobytes())
        bench.memory.write(_BASE["copy"], b"\xee" * (2 * params + 2))
        g, p, m, v = (_BASE[name] for name in ("g", "p", "m", "v"))
        await bench.update(UpdateCommand(adam, params, g, p, m, v, p, m, v, copy, _BASE["copy"]))
        assert await bench.read("status") == Status.OK
        assert await bench.read("params_done") == params
        want = adam_step(adam, **state, copy=copy)
        for name in ("p", "m", "v"):
            assert bytes(bench.memory.read(_BASE[name], 4 * params)) == getattr(want, name).tobytes(), name
        written = b"" if want.copy is None else want.copy.tobytes()
        seen = bytes(bench.memory.read(_BASE["copy"], 2 * params + 2))
        assert seen == written + b"\xee" * (2 * params + 2 - len(written))


@test()
async def identity_says_what_was_built(dut: Any) -> None:
    """Magic, ABI version, digest and git revision."""
    await start(dut)
    dut.git_revision.value = 0x1234ABCD
    bench = Bench(dut)
    assert await bench.read("magic") == MAGIC
    assert await bench.read("config_digest") == update_config("update-tiny").digest64
    assert await bench.read("git_revision") == 0x1234ABCD


@test()
async def a_misaligned_command_touches_nothing(dut: Any) -> None:
    """Status and address; no bus traffic."""
    await start(dut)
    bench = Bench(dut)
    traffic: list[int] = []
    watch = cocotb.start_soon(_watch_addresses(dut, traffic))
    addresses = (0x1000, 0x2004, 0x3000, 0x4000, 0x2000, 0x3000, 0x4000)
    await bench.update(UpdateCommand(AdamStep(lr=1e-3, step=1), 5, *addresses))
    assert await bench.read("status") == Status.MISALIGNED
    assert await bench.read("fault_address") == 0x2004
    watch.cancel()
    assert not traffic


async def _watch_addresses(dut: Any, ports: list[int]) -> None:
    while True:
        await RisingEdge(dut.clk)
        for port in range(4):
            if getattr(dut, f"m_axi_gmem{port}__arvalid").value or getattr(dut, f"m_axi_gmem{port}__awvalid").value:
                ports.append(port)
