"""A kernel's Verilog with cocotbext-axi at its ports: registers by name, one memory, one command."""

import json
import mmap
import os
from pathlib import Path

from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, First, RisingEdge
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiRam

MEMORY_BYTES = 1 << 20


class Kernel:
    """The kernel that the JSON file beside its Verilog describes, behind `dut`."""

    def __init__(self, dut):
        self.dut = dut
        self.description = json.loads(Path(os.environ["NEARFLASH_KERNEL"]).read_text())
        reset = {"reset": dut.ap_rst_n, "reset_active_level": False}
        self._control = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axi_control"), dut.ap_clk, **reset)
        shared = mmap.mmap(-1, MEMORY_BYTES)  # one memory behind all ports
        ports = [name.removesuffix("_awaddr") for name in self.description["ports"] if name.endswith("_awaddr")]
        self._rams = [
            AxiRam(AxiBus.from_prefix(dut, port), dut.ap_clk, size=MEMORY_BYTES, mem=shared, **reset)
            for port in ports
            if port.startswith("m_axi_gmem")
        ]
        self.memory = self._rams[0]

    async def start(self):
        """Start the clock, and hold the reset for some cycles."""
        Clock(self.dut.ap_clk, 10, unit="ns").start()
        self.dut.ap_rst_n.value = 0
        await ClockCycles(self.dut.ap_clk, 5)
        self.dut.ap_rst_n.value = 1
        await ClockCycles(self.dut.ap_clk, 5)

    async def write(self, name, value):
        """Write a register of 32 or 64 bits."""
        register = self.description["registers"][name]
        data = value.to_bytes(register["width_bits"] // 8, "little")
        await self._control.write(register["offset"], data)

    async def read(self, name):
        """Read a register of 32 or 64 bits."""
        register = self.description["registers"][name]
        response = await self._control.read(register["offset"], register["width_bits"] // 8)
        return int.from_bytes(response.data, "little")

    async def run(self, registers, limit_cycles=60_000):
        """Run the command of these registers, value by name, to its interrupt; its status must be OK."""
        for name, value in registers.items():
            await self.write(name, value)
        await self.write("interrupt_enable", 1)
        await self.write("interrupt_mask", 1)
        await self.write("control", 1)  # ap_start
        done = RisingEdge(self.dut.interrupt)
        assert await First(done, ClockCycles(self.dut.ap_clk, limit_cycles)) is done, "no interrupt"
        assert await self.read("control") & 2, "ap_done must be set"
        await self.write("interrupt_status", 1)
        assert await self.read("status") == self.description["status"]["OK"]
