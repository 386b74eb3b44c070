"""A kernel under cocotb: cocotbext-axi drives its registers and is one memory behind all its ports."""

import itertools
import mmap
import random
from collections.abc import Mapping
from typing import Any

import cocotb
from cocotb.triggers import ClockCycles, First, RisingEdge
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiRam

from nearflash.abi.fields import RegisterMap

__all__ = ["KernelTestbench"]

_MEMORY_BYTES = 1 << 20


class KernelTestbench:
    """Register master and memory of a kernel with `ports` AXI ports; `limit_cycles` for a command."""

    def __init__(self, dut: Any, registers: RegisterMap, ports: int = 1, limit_cycles: int = 60_000) -> None:
        self.dut, self._block, self._limit_cycles = dut, registers, limit_cycles
        self._registers = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axi_control_"), dut.clk, dut.rst)
        memory = mmap.mmap(-1, _MEMORY_BYTES)
        self._ports = [
            AxiRam(AxiBus.from_prefix(dut, f"m_axi_gmem{k}_"), dut.clk, dut.rst, size=_MEMORY_BYTES, mem=memory)
            for k in range(ports)
        ]
        self.memory = self._ports[0]

    def pause(self, seed: int, share: float) -> None:
        """Make every channel of every port pause at random, in this share of the cycles."""
        for index, port in enumerate(self._ports):
            write, read = port.write_if, port.read_if
            channels = (write.aw_channel, write.w_channel, write.b_channel, read.ar_channel, read.r_channel)
            for offset, channel in enumerate(channels):
                rng = random.Random(100 * seed + 10 * index + offset)
                channel.set_pause_generator(rng.random() < share for _ in itertools.count())

    async def write(self, name: str, value: int) -> None:
        """Write a register by name."""
        register = self._block[name]
        for word in range(register.width_bits // 32):
            await self._registers.write_dword(register.offset + 4 * word, value >> 32 * word & 0xFFFFFFFF)

    async def read(self, name: str) -> int:
        """Read a register by name."""
        register = self._block[name]
        words = range(register.width_bits // 32)
        values = [await self._registers.read_dword(register.offset + 4 * word) for word in words]
        return sum(value << 32 * word for word, value in enumerate(values))

    async def run(self, registers: Mapping[str, int]) -> None:
        """Run the command of these registers to its interrupt."""
        for name, value in registers.items():
            await self.write(name, value)
        await self.write("interrupt_enable", 1)
        await self.write("interrupt_mask", 1)
        await self.write("control", 1)
        done = RisingEdge(self.dut.interrupt)
        assert await First(done, ClockCycles(self.dut.clk, self._limit_cycles)) is done, "no interrupt"
        assert await self.read("control") & 0b10, "ap_done must be set"
        await self.write("interrupt_status", 1)

    def watch_addresses(self) -> list[int]:
        """A list that grows by a port's number with each cycle in which the port asks for an address."""
        seen: list[int] = []
        cocotb.start_soon(self._watch(seen))
        return seen

    async def _watch(self, seen: list[int]) -> None:
        while True:
            await RisingEdge(self.dut.clk)
            for port in range(len(self._ports)):
                if any(getattr(self.dut, f"m_axi_gmem{port}__{name}").value for name in ("arvalid", "awvalid")):
                    seen.append(port)
