"""The whole flow with its real programs, on a small design behind a real processor system; where they were fetched."""

import pytest
from amaranth import ClockDomain, ClockSignal, Instance, Module, Signal
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


@pytest.mark.skipif(fetched() is None, reason="programs of Debian sid were not fetched: make bitstream fetches them")
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
