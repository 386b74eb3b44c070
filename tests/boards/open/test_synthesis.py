"""From a small design to cells; yosys really runs."""

import json

import pytest
from amaranth import Module, Signal
from amaranth.back import rtlil
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.errors import FormatError
from nearflash.boards.open.packages import ToolsError
from nearflash.boards.open.synthesis import count_cells, synthesise, tap_shift_registers, yosys_version
from nearflash.device.bitstreams.board import Resources


class Counter(wiring.Component):
    i: In(8)
    o: Out(8)

    def elaborate(self, platform):
        m = Module()
        total = Signal(8)
        m.d.sync += total.eq(total + self.i)
        m.d.comb += self.o.eq(total)
        return m


def test_a_counter_becomes_cells_with_pads(tmp_path):
    source, netlist = tmp_path / "top.il", tmp_path / "top.json"
    source.write_text(rtlil.convert(Counter(), name="top", emit_src=False))
    found = synthesise(source, "xc7", netlist)
    assert (found.ff, found.dsp, found.bram36) == (8, 0, 0) and found.lut >= 8
    cells = json.loads(netlist.read_text())["modules"]["top"]["cells"]
    assert sum(cell["type"] == "IBUF" for cell in cells.values()) >= 8
    assert (tmp_path / "top.yosys.log").exists()


def test_what_yosys_cannot_read_is_an_error_with_its_output(tmp_path):
    (tmp_path / "top.il").write_text("module \\top\n")
    with pytest.raises(ToolsError, match=r"(?s)failed .*yosys.log ends:"):
        synthesise(tmp_path / "top.il", "xc7", tmp_path / "top.json")


def test_cells_are_counted_by_what_they_take():
    kinds = ["LUT1", "LUT6", "INV", "SRL16E", "RAM32M", "RAM64X1S", "FDRE", "FDSE", "FDPE", "DSP48E1", "RAMB36E1",
             "RAMB18E1", "CARRY4", "PS7", "BUFG"]  # fmt: skip
    assert count_cells({kind: {"type": kind} for kind in kinds}) == Resources(lut=9, ff=3, dsp=1, bram36=1.5)
    assert count_cells({}) == Resources(0, 0, 0, 0)


def test_the_version_is_the_installed_ones():
    assert yosys_version().startswith("0.")


def shift_register(address, **outputs):
    directions = {"A": "input", "D": "input", **dict.fromkeys(outputs, "output")}
    pins = {"A": list(f"{address:05b}"[::-1]), "D": [1], **{pin: [net] for pin, net in outputs.items()}}
    return {"type": "SRLC32E", "port_directions": directions, "connections": pins}


def sink(net):
    return {"type": "FDRE", "port_directions": {"D": "input"}, "connections": {"D": [net]}}


def test_the_last_bit_of_a_shift_register_comes_from_its_tap():
    registers = {"chained": shift_register(9, Q=2, Q31=3), "tapped": shift_register(9, Q=4, Q31=5),
                 "alone": shift_register(9, Q31=6), "short": shift_register(9, Q=7)}  # fmt: skip
    cells = {**registers, "a": sink(3), "b": sink(4), "c": sink(6)}
    tap_shift_registers(cells)
    found = {name: (cell["connections"]["A"], cell["connections"]["Q"]) for name, cell in registers.items()}
    nine, last = ["1", "0", "0", "1", "0"], ["1"] * 5
    assert found == {"chained": (last, [3]), "tapped": (nine, [4]), "alone": (last, [6]), "short": (nine, [7])}
    assert not [name for name, cell in cells.items() if "Q31" in cell["connections"] | cell["port_directions"]]


def test_a_shift_register_has_one_output():
    cells = {"both": shift_register(9, Q=2, Q31=3), "a": sink(2), "b": sink(3)}
    with pytest.raises(FormatError, match="shift register both must have one output, not Q and Q31"):
        tap_shift_registers(cells)
