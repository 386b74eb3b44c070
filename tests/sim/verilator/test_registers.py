"""Clocked blocks from blocks of next values."""

import numpy as np
import pytest
from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilator.registers import clock_registers
from nearflash.sim.verilog import convert

NEXT = """module \\top.unit (clk, rst, i);
  input clk;
  input rst;
  input [3:0] i;
  reg [3:0] \\$1 ;
  reg [3:0] q = 4'h0;
  always @(posedge clk)
    q <= \\$1 ;
  always @* begin
    if (\\$auto$verilog_backend.cc:2355:dump_module$1 ) begin end
    \\$1  = q;
    casez (i)
      4'h1:
          \\$1 [1:0] = i[1:0];
      4'h2:
          /* empty */;
    endcase
    if (i[3]) begin
      \\$1  = q;
    end
    if (rst) begin
      \\$1  = 4'h0;
    end
  end
endmodule
"""

CLOCKED = """module \\top.unit (clk, rst, i);
  input clk;
  input rst;
  input [3:0] i;
  reg [3:0] \\$1 ;
  reg [3:0] q = 4'h0;
  always @(posedge clk) begin
    casez (i)
      4'h1:
          q[1:0] <= i[1:0];
      4'h2:
          /* empty */;
    endcase
    if (i[3]) begin
      q <= q;
    end
    if (rst) begin
      q <= 4'h0;
    end
  end
endmodule
"""


def test_a_next_value_becomes_a_clocked_block():
    assert clock_registers(NEXT) == CLOCKED


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("endmodule", "  assign o = \\$1 ;\nendmodule"),
        ("    if (rst)", "    if (\\$1 [0])"),
        ("    if (rst) begin\n", "    if (rst) begin\n      other = 1'h1;\n"),
        ("    if (rst) begin\n", "    if (rst) begin\n      { other, one } = 2'h1;\n"),
        ("    q <= \\$1 ;", "    q[2:0] <= \\$1 [2:0];"),
    ],
    ids=["read by others", "read by itself", "two targets", "joined targets", "part of it"],
)
def test_other_blocks_stay(before, after):
    text = NEXT.replace(before, after)
    assert text != NEXT
    assert clock_registers(text) == text


class Registers(wiring.Component):
    """Three registers: one with holds and resets, one of which only parts change, one that others read before time."""

    LATENCY = 1

    def __init__(self):
        super().__init__({"i": In(8), "held": Out(8), "parts": Out(8), "last": Out(8)})

    def elaborate(self, platform):
        m = Module()
        following = Signal(8)
        m.d.comb += following.eq(Mux(self.i[0], self.i, self.last + 1))
        m.d.sync += self.last.eq(following)
        with m.If(self.i[7]):
            m.d.sync += self.held.eq(self.i)
        with m.If(self.i[6]):
            m.d.sync += self.held.eq(self.held)
        with m.Switch(self.i[:2]):
            with m.Case(1):
                m.d.sync += self.parts[:4].eq(self.i[4:])
            with m.Case(2):
                m.d.sync += self.parts[4:].eq(following[:4])
        return m


def expected(values):
    held = parts = last = 0
    for value in values:
        following = value if value & 1 else (last + 1) % 256
        if value & 3 == 1:
            parts = parts & 0xF0 | value >> 4
        if value & 3 == 2:
            parts = parts & 0x0F | (following & 15) << 4
        if value & 128 and not value & 64:
            held = value
        last = following
        yield held, parts, last


def test_the_design_computes_what_it_did(tmp_path):
    text = convert(Registers()).write_verilog(tmp_path).read_text()
    assert clock_registers(text).count("always @*") < text.count("always @*")
    values = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    out = BurstUnit(Registers(), "sim-registers").run({"i": values})
    found = zip(*(out[name].tolist() for name in ("held", "parts", "last")), strict=True)
    assert list(found) == list(expected(values.tolist()))
