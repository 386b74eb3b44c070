"""Masks of the lowest n bits as one shift."""

import numpy as np
import pytest
from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilator.thermometers import shift_masks
from nearflash.sim.verilog import convert

COMPARED = """module unit (n, o);
  assign \\$1  = n > 1'h0;
  assign \\$2  = n > 1'h1;
  assign \\$3  = n > 2'h2;
  assign \\$4  = n > 2'h3;
  assign o = \\$5  & { \\$4 , \\$3 , \\$2 , \\$1  };
endmodule
"""


def test_comparisons_become_a_shift():
    assert shift_masks(COMPARED) == COMPARED.replace("\\$4 , \\$3 , \\$2 , \\$1  ", "~ (4'hf << n) ")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\\$2 , \\$1 ", "\\$1 , \\$2 "),
        ("n > 1'h0", "m > 1'h0"),
        ("n > 2'h3", "n > 3'h4"),
        ("\\$4 , ", "\\$5 , "),
        ("\\$4 , ", ""),
    ],
    ids=["another order", "another number", "a gap", "another bit", "too short"],
)
def test_others_stay(before, after):
    text = COMPARED.replace(before, after)
    assert text != COMPARED
    assert shift_masks(text) == text


class Masks(wiring.Component):
    """A mask as long as its number can say, a shorter one, and one of a part of the number."""

    LATENCY = 0

    def __init__(self):
        super().__init__({"n": In(5), "long": Out(31), "short": Out(9), "part": Out(8)})

    def elaborate(self, platform):
        m = Module()
        for mask, number in ((self.long, self.n), (self.short, self.n), (self.part, self.n[:3])):
            m.d.comb += mask.eq(Cat(k < number for k in range(len(mask))))
        return m


def test_the_design_computes_what_it_did(tmp_path):
    text = convert(Masks()).write_verilog(tmp_path).read_text()
    assert shift_masks(text).count("<<") >= 2
    out = BurstUnit(Masks(), "sim-thermometers").run({"n": np.arange(32, dtype=np.uint8)})
    for n in range(32):
        assert [out[name][n] for name in ("long", "short", "part")] == [2**n - 1, 2 ** min(n, 9) - 1, 2 ** (n % 8) - 1]
