"""The whole flow with its real programs, on a small design behind a real processor system; where they were fetched."""

import pytest
from amaranth import Cat, ClockDomain, ClockSignal, Instance, Module, Signal
from amaranth.back import rtlil
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from nearflash.boards.open.build import implement
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.packages import fetched
from nearflash.device.bitstreams.board import Routing
from nearflash.device.bitstreams.header import read_header

PART = "xc7z020clg400-1"
#: What an XC7Z020 is configured by (AMD UG470: 32,364,512 bits).
PAYLOAD_BYTES = 4_045_564


class Blinker(wiring.Component):
    """A counter at FCLK0, and two shift registers of which one is longer than a primitive."""

    led: Out(1)

    def elaborate(self, platform):
        m = Module()
        m.domains.sync = ClockDomain(reset_less=True)
        clocks, count, short, long = Signal(4), Signal(12), Signal(8), Signal(40)
        m.submodules.ps7 = Instance("PS7", o_FCLKCLK=clocks)
        m.submodules.buffer = Instance("BUFG", i_I=clocks[0], o_O=ClockSignal())
        m.d.sync += [count.eq(count + 1), short.eq((short << 1) | count[-1]), long.eq((long << 1) | short[-1])]
        m.d.comb += self.led.eq(long[-1] ^ short[-1])
        return m


class Multiplier(wiring.Component):
    """A sum in a DSP slice without registers, and a product of it in one with registers all along."""

    led: Out(1)

    def elaborate(self, platform):
        m = Module()
        m.domains.sync = ClockDomain(reset_less=True)
        clocks, count, other, total = Signal(4), Signal(30), Signal(30), Signal(30)
        left, right, product, result = Signal(17), Signal(17), Signal(34), Signal(34)
        m.submodules.ps7 = Instance("PS7", o_FCLKCLK=clocks)
        m.submodules.buffer = Instance("BUFG", i_I=clocks[0], o_O=ClockSignal())
        m.d.comb += [total.eq(count + other), self.led.eq(result[-1])]
        m.d.sync += [
            count.eq(Cat(~count[-1] ^ count[2], count)), other.eq(Cat(other[-1] ^ ~other[5], other)),
            left.eq(total[13:]), right.eq(count[13:]), product.eq(left * right), result.eq(product)
        ]  # fmt: skip
        return m


needs_programs = pytest.mark.skipif(
    fetched() is None, reason="programs of Debian sid were not fetched: make bitstream fetches them"
)


@needs_programs
def test_each_dsp_slice_has_the_delays_of_its_registers(tmp_path):
    # Regression: all slices had the delays of the slowest, so that paths passed through those with registers.
    programs = fetched()
    database = PartDatabase(programs.bit_database("zynq7"), PART)
    (tmp_path / "top.il").write_text(rtlil.convert(Multiplier(), name="top", emit_src=False))
    routing = Routing(150_000_000, 1, dsp_adder_bits=28)
    made = implement(programs, database, tmp_path / "top.il", "xc7", {"led": "R14"}, routing)
    assert made.cells.dsp == 2
    passed = [float(step.split()[0]) for step in made.routed.critical_path if step.split()[2] == "logic"]
    assert passed == [2.08], made.routed.critical_path
    assert made.routed.critical_path[-1].startswith("0.36 ns setup")


@needs_programs
def test_a_small_design_reads_back_without_a_differing_bit(tmp_path):
    programs = fetched()
    database = PartDatabase(programs.bit_database("zynq7"), PART)
    (tmp_path / "top.il").write_text(rtlil.convert(Blinker(), name="top", emit_src=False))
    made = implement(programs, database, tmp_path / "top.il", "xc7", {"led": "R14"}, Routing(100_000_000, 1))
    assert made.routed.fmax_hz > 150_000_000
    assert made.cells.ff >= 12 and made.cells.lut >= 3
    assert made.routed.critical_path[0].split()[2] == "clk-to-q"
    header = read_header(made.bitstream)
    assert (header.design, header.part, header.payload_bytes) == ("top", PART, PAYLOAD_BYTES)
    first = made.bitstream.read_bytes()
    again = implement(programs, database, tmp_path / "top.il", "xc7", {"led": "R14"}, Routing(100_000_000, 1))
    assert again.bitstream.read_bytes() == first, "equal sources give equal files"
