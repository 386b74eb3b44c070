import re

import pytest
from amaranth import Module
from amaranth.back import rtlil
from amaranth.lib import wiring
from amaranth.lib.wiring import Out
from amaranth.sim import Simulator

from nearflash.gateware.bus.axi import Axi4Signature, AxiLiteSignature, connect_channels
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.write import BurstWriter


class Port(wiring.Component):
    """A kernel's port with a reader and a writer behind it."""

    m_axi_gmem0: Out(Axi4Signature(64))

    def elaborate(self, platform):
        m = Module()
        m.submodules.reader = self.reader = BurstReader(64, max_burst_bytes=128)
        m.submodules.writer = self.writer = BurstWriter(64, max_burst_bytes=128)
        connect_channels(m, self.reader.bus, self.m_axi_gmem0)
        connect_channels(m, self.writer.bus, self.m_axi_gmem0)
        return m


def test_ports_have_the_standard_names():
    ports = set(re.findall(r"(?:in|out)put \d+ +\\m_axi_gmem0__(\w+)", rtlil.convert(Port(), name="top")))
    address = {"id", "addr", "len", "size", "burst", "cache", "prot", "valid", "ready"}
    assert ports == (
        {f"a{way}{name}" for way in "wr" for name in address}
        | {"wdata", "wstrb", "wlast", "wvalid", "wready", "bid", "bresp", "bvalid", "bready"}
        | {"rid", "rdata", "rresp", "rlast", "rvalid", "rready"}
    )


def test_reader_and_writer_share_a_port():
    dut = Port()
    port = dut.m_axi_gmem0
    seen = []

    async def testbench(ctx):
        ctx.set(port.arready, 1)
        ctx.set(dut.reader.i_command.payload, {"address": 0x1000, "beats": 2})
        ctx.set(dut.reader.i_command.valid, 1)
        await ctx.tick()
        ctx.set(dut.reader.i_command.valid, 0)
        await ctx.tick().until(port.arvalid)
        seen.append(ctx.get(port.araddr))
        ctx.set(port.rvalid, 1)
        ctx.set(port.rdata, 0x55)
        await ctx.tick().repeat(3)
        seen.append(ctx.get(dut.reader.o.payload))

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    assert seen == [0x1000, 0x55]


def test_data_width_message():
    with pytest.raises(ValueError, match=r"data_width_bits must be one of \(32, 64, 128, 256, 512\), not 1024"):
        Axi4Signature(1024)


def test_address_width_message():
    with pytest.raises(ValueError, match="address_bits must be 3 to 64, not 2"):
        AxiLiteSignature(2)
