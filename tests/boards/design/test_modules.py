"""Equal modules of a design become one."""

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.boards.design.modules import share_modules
from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilog import convert


class Inner(wiring.Component):
    """Uses a signal of its parent, for which Amaranth makes a port by itself."""

    def __init__(self, borrowed, step):
        self.borrowed, self.step = borrowed, step
        super().__init__({"o": Out(8)})

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.o.eq(self.borrowed + self.step)
        return m


class Lane(wiring.Component):
    def __init__(self, step):
        self.step = step
        super().__init__({"i": In(8), "o": Out(8)})

    def elaborate(self, platform):
        m = Module()
        twice = Signal(8)
        m.submodules.inner = inner = Inner(twice, self.step)
        m.d.comb += [twice.eq(2 * self.i), self.o.eq(inner.o)]
        return m


class Lanes(wiring.Component):
    """Lane n adds steps[n] to twice its input."""

    LATENCY = 0

    def __init__(self, steps):
        self.steps = steps
        super().__init__({"i": In(8).array(len(steps)), "o": Out(8).array(len(steps))})

    def elaborate(self, platform):
        m = Module()
        for index, step in enumerate(self.steps):
            lane = m.submodules[f"lane_{index}"] = Lane(step)
            m.d.comb += [lane.i.eq(self.i[index]), self.o[index].eq(lane.o)]
        return m


def test_equal_modules_are_one_and_others_stay():
    text, stands_for = share_modules(convert(Lanes([1, 2, 1])).read_rtlil())
    assert stands_for == {
        "top": "top", "top.lane_0": "top.lane_0", "top.lane_1": "top.lane_1", "top.lane_2": "top.lane_0",
        "top.lane_0.inner": "top.lane_0.inner", "top.lane_1.inner": "top.lane_1.inner",
        "top.lane_2.inner": "top.lane_0.inner",
    }  # fmt: skip
    assert text.count("\nmodule ") == 5


@pytest.mark.full
def test_the_design_computes_what_it_did():
    unit = BurstUnit(Lanes([1, 2, 1]), "sim-lanes")
    out = unit.run({f"i__{n}": np.array([3, 100 + n], np.uint8) for n in range(3)})
    assert [out[f"o__{n}"].tolist() for n in range(3)] == [[7, 201], [8, 204], [7, 205]]
