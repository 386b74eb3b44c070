"""KernelLibrary on a small DMA copy kernel: data, timing of the memory model, and every way to fail."""

import os

import numpy as np
import pytest
from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import Axi4ReadSignature, Axi4WriteSignature, AxiLiteSignature
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.write import BurstWriter
from nearflash.sim.stalls import SimulationTimeout
from nearflash.sim.verilator.kernel import KernelLibrary, MemoryModel, ProtocolError, SimulatedBusError

CONTROL, ERROR, SOURCE, TARGET, BEATS, REVISION = range(0, 24, 4)
FLAW, FLAWS = 0x04, ("", "wlast", "size", "lost")
BASE = 0x1000_0000
MEMORY_BYTES = 1 << 20


class Copy(wiring.Component):
    """Copies BEATS beats of 128 bits from SOURCE to TARGET when CONTROL is written; interrupt when done.

    FLAW breaks one thing, by its place in FLAWS: "wlast" (never set), "size" (narrow bursts), "lost" (drops the 5th
    beat).
    """

    s_axi_control: In(AxiLiteSignature(8))
    m_axi_gmem0: Out(Axi4ReadSignature(128))
    m_axi_gmem1: Out(Axi4WriteSignature(128))
    interrupt: Out(1)
    git_revision: In(32)

    def elaborate(self, platform):
        m = Module()
        m.submodules.reader = reader = BurstReader(128, max_outstanding=4, max_burst_bytes=256)
        m.submodules.writer = writer = BurstWriter(128, max_outstanding=4, max_burst_bytes=256)
        registers = [Signal(32, name=f"register{index}") for index in range(5)]
        start, busy, count = Signal(), Signal(), Signal(32)
        wiring.connect(m, reader.bus, wiring.flipped(self.m_axi_gmem0))
        wiring.connect(m, writer.bus, wiring.flipped(self.m_axi_gmem1))
        m.d.comb += [
            reader.i_command.payload.address.eq(registers[2]),
            reader.i_command.payload.beats.eq(registers[4]),
            reader.i_command.valid.eq(start),
            writer.i_command.payload.address.eq(registers[3]),
            writer.i_command.payload.beats.eq(registers[4]),
            writer.i_command.valid.eq(start),
            writer.i.payload.data.eq(reader.o.payload),
            writer.i.payload.strb.eq(~0),
            writer.i.valid.eq(reader.o.valid),
            reader.o.ready.eq(writer.i.ready),
            self.interrupt.eq(busy & ~start & reader.idle & writer.idle),
        ]
        with m.If(reader.o.valid & reader.o.ready):
            m.d.sync += count.eq(count + 1)
        with m.If(start):
            m.d.sync += busy.eq(1)
        with m.Switch(registers[1]):
            with m.Case(FLAWS.index("wlast")):
                m.d.comb += self.m_axi_gmem1.wlast.eq(0)
            with m.Case(FLAWS.index("size")):
                m.d.comb += self.m_axi_gmem0.arsize.eq(2)
            with m.Case(FLAWS.index("lost")):
                m.d.comb += writer.i.valid.eq(reader.o.valid & (count != 4))
        self.control(m, registers, start, Cat(reader.error.response, writer.error.response))
        return m

    def control(self, m, registers, start, error):
        bus = self.s_axi_control
        m.d.sync += start.eq(0)
        m.d.comb += [bus.awready.eq(bus.wvalid & ~bus.bvalid), bus.wready.eq(bus.awvalid & ~bus.bvalid)]
        with m.If(bus.awvalid & bus.wvalid & ~bus.bvalid):
            m.d.sync += [bus.bvalid.eq(1), bus.bresp.eq(0)]
            with m.Switch(bus.awaddr[2:]):
                for index, register in enumerate(registers):
                    with m.Case(index):
                        m.d.sync += register.eq(bus.wdata)
                with m.Default():
                    m.d.sync += bus.bresp.eq(2)
            with m.If(bus.awaddr == CONTROL):
                m.d.sync += start.eq(1)
        with m.If(bus.bvalid & bus.bready):
            m.d.sync += bus.bvalid.eq(0)
        m.d.comb += bus.arready.eq(~bus.rvalid)
        with m.If(bus.arvalid & ~bus.rvalid):
            m.d.sync += bus.rvalid.eq(1)
            with m.Switch(bus.araddr):
                with m.Case(ERROR):
                    m.d.sync += bus.rdata.eq(error)
                with m.Case(REVISION):
                    m.d.sync += bus.rdata.eq(self.git_revision)
                with m.Default():
                    m.d.sync += bus.rdata.eq(registers[2])
        with m.If(bus.rvalid & bus.rready):
            m.d.sync += bus.rvalid.eq(0)


@pytest.fixture
def open_copy():
    def open_(flaw=None, **options):
        kernel = KernelLibrary(Copy(), "test_copy", memory_bytes=MEMORY_BYTES, **options)
        if flaw:
            kernel.write_register(FLAW, FLAWS.index(flaw))
        return kernel

    return open_


def copy(kernel, source, target, beats, limit_cycles=100_000):
    for offset, value in ((SOURCE, BASE + source), (TARGET, BASE + target), (BEATS, beats), (CONTROL, 1)):
        kernel.write_register(offset, value)
    return kernel.run(limit_cycles)


@pytest.mark.parametrize("stall_percent", [0, 10, 50, 90])
@pytest.mark.parametrize("source, target, beats", [(0, 0x80000, 1), (0x40, 0x8FF0, 700)])
def test_copy_is_exact(open_copy, source, target, beats, stall_percent):
    kernel = open_copy(model=MemoryModel(stall_percent=stall_percent, seed=beats))
    rng = np.random.default_rng(beats)
    kernel.memory[:] = rng.integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    expected = kernel.memory.copy()
    expected[target : target + 16 * beats] = expected[source : source + 16 * beats]
    copy(kernel, source, target, beats)
    assert (kernel.memory == expected).all()
    assert kernel.statistics()["m_axi_gmem0"].read_bytes == 16 * beats
    assert kernel.statistics()["m_axi_gmem1"].written_bytes == 16 * beats
    assert kernel.statistics()["m_axi_gmem1"].write_bursts == -(-(target % 256 + 16 * beats) // 256)


def test_latency_and_bandwidth(open_copy):
    beats = 1000
    cycles = {
        model: copy(open_copy(model=model), 0, 0x80000, beats)
        for model in (
            MemoryModel(),
            MemoryModel(read_latency_cycles=132),
            MemoryModel(write_latency_cycles=116),
            MemoryModel(port_bytes_per_cycle=4),
            MemoryModel(total_bytes_per_cycle=8),
        )
    }
    base, slow_read, slow_write, port, total = cycles.values()
    assert base < beats + 100
    # Four bursts of 16 beats cover 64 of the 132 cycles of latency.
    assert slow_read == pytest.approx(beats / 64 * (132 + 16), rel=0.15)
    assert slow_write == pytest.approx(beats / 64 * (116 + 16), rel=0.15)
    assert port == pytest.approx(beats * 16 / 4, rel=0.03)
    assert total == pytest.approx(beats * 32 / 8, rel=0.03)


def test_registers(open_copy):
    kernel = open_copy(git_revision=0xCAFE0001)
    assert kernel.read_register(REVISION) == 0xCAFE0001
    kernel.write_register(SOURCE, 0xFFFFFFFF)
    assert kernel.read_register(SOURCE) == 0xFFFFFFFF
    with pytest.raises(SimulatedBusError, match="write of register 0x40 must be answered with OKAY, not SLVERR"):
        kernel.write_register(0x40, 1)


@pytest.mark.parametrize("source", [MEMORY_BYTES - 0x100, -0x1000, MEMORY_BYTES])
def test_outside_the_memory(open_copy, source):
    kernel = open_copy()
    kernel.memory[:] = 7
    copy(kernel, source, 0, 64)
    assert kernel.read_register(ERROR) == 3
    copy(kernel, 0, source, 64)
    assert kernel.read_register(ERROR) == 3 | 3 << 2
    assert set(kernel.memory.tolist()) <= {0, 7}


def test_a_hung_kernel_names_what_waits(open_copy):
    kernel = open_copy("lost")
    text = (
        r"no interrupt within 5000 cycles: reader.i_command waits for data; .*; writer.split.o waits for ready; .*more$"
    )
    with pytest.raises(SimulationTimeout, match=text):
        copy(kernel, 0, 0x1000, 16, limit_cycles=5000)
    kernel.reset()
    assert not any(wait.startswith("m_axi") for wait in kernel.waits())


def test_a_stuck_memory_is_named(open_copy):
    kernel = open_copy(model=MemoryModel(stall_percent=100))
    with pytest.raises(SimulationTimeout, match=r"no interrupt within 300 cycles: m_axi_gmem0.ar waits for ready; "):
        copy(kernel, 0, 0x1000, 16, limit_cycles=300)
    kernel.configure(MemoryModel())
    kernel.run(1000)


def test_protocol_errors(open_copy):
    with pytest.raises(ProtocolError, match=r"m_axi_gmem1: at cycle \d+, wlast must come with beat 16, not be missing"):
        copy(open_copy("wlast"), 0, 0x1000, 32)
    with pytest.raises(ProtocolError, match=r"m_axi_gmem0: at cycle \d+, arsize must be a full beat, not 2"):
        copy(open_copy("size"), 0, 0x1000, 32)


@pytest.mark.full
def test_waves(open_copy, tmp_path):
    kernel = open_copy(trace=True)
    kernel.start_trace(tmp_path / "copy.vcd", cycles=50, delay_cycles=10)
    copy(kernel, 0, 0x1000, 16)
    kernel.stop_trace()
    text = (tmp_path / "copy.vcd").read_text()
    times = [int(line[1:]) for line in text.splitlines() if line.startswith("#")]
    assert (times[0], times[-1]) == (20, 119)
    assert "m_axi_gmem0__araddr" in text
    with pytest.raises(ValueError, match="the library must be made with trace=True"):
        open_copy().start_trace(tmp_path / "none.vcd", cycles=1)


def test_memory_takes_direct_io(open_copy, tmp_path):
    kernel = open_copy()
    kernel.memory[:4096] = np.arange(4096) % 251
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(tmp_path / "flash", flags)
    except OSError:
        pytest.skip(f"{tmp_path} must be on a file system with direct I/O")
    try:
        assert os.pwritev(file, [kernel.memory[:4096]], 0) == 4096
        assert os.preadv(file, [kernel.memory[8192:12288]], 0) == 4096
    finally:
        os.close(file)
    assert (kernel.memory[8192:12288] == kernel.memory[:4096]).all()


def test_memory_outlives_the_library(open_copy):
    kernel = open_copy()
    memory = kernel.memory
    kernel.close()
    kernel.close()
    memory[:] = 9
    assert memory[-1] == 9
    with pytest.raises(ValueError, match="the kernel library must be open, not closed"):
        kernel.read_register(REVISION)


def test_the_first_kernel_may_be_closed_last(open_copy):
    """Freeing one used the Verilator context of the kernel opened last, which was gone: a deadlock."""
    kernels = [open_copy() for _ in range(3)]
    for kernel in reversed(kernels[1:]):
        kernel.close()
    copy(kernels[0], 0, 4096, 4)
    kernels[0].close()


def test_bad_arguments(open_copy):
    with pytest.raises(ValueError, match="memory_bytes must be a positive multiple of 4096, not 5000"):
        KernelLibrary(Copy(), "test_copy", memory_bytes=5000)
    with pytest.raises(ValueError, match="latencies must be at least 1 cycle, not 0"):
        MemoryModel(read_latency_cycles=0)
    with pytest.raises(ValueError, match="outstanding_bursts must be 1 to 64, not 65"):
        MemoryModel(outstanding_bursts=65)
    with pytest.raises(ValueError, match=r"stall_percent must be within \[0, 100\], not 101"):
        MemoryModel(stall_percent=101)
    with pytest.raises(ValueError, match=r"rates must be 0 \(no limit\) or more bytes per cycle, not -1"):
        MemoryModel(port_bytes_per_cycle=-1)
    with pytest.raises(
        ValueError,
        match=r"a kernel must have the ports interrupt, s_axi_control__arvalid, .*, not just i_command__payload",
    ):
        KernelLibrary(BurstReader(64), "test_reader", memory_bytes=4096)
