"""From a small design to cells; yosys really runs."""

import subprocess
import sys

import pytest
from amaranth import Module, Signal
from amaranth.back import rtlil
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.errors import FormatError
from nearflash.boards.open.packages import ToolsError
from nearflash.boards.open.synthesis import (
    DSP_ADDER,
    count_cells,
    join_memories,
    synthesise,
    tap_shift_registers,
    tie_processor,
    yosys_version,
)
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


@pytest.mark.full
def test_a_counter_becomes_cells_with_pads(tmp_path):
    (tmp_path / "top.il").write_text(rtlil.convert(Counter(), name="top", emit_src=False))
    top = synthesise(tmp_path / "top.il", "xc7", {"router2/estimateWeight": "0.6"})["modules"]["top"]
    cells = top["cells"]
    found = count_cells(cells)
    assert (found.ff, found.dsp, found.bram36) == (8, 0, 0) and found.lut >= 8
    assert top["settings"] == {"router2/estimateWeight": "0.6"}
    assert sum(cell["type"] == "IBUF" for cell in cells.values()) >= 8
    assert (tmp_path / "top.yosys.log").exists()


class Sum(wiring.Component):
    a: In(30)
    b: In(30)
    wide: Out(30)
    narrow: Out(20)

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [self.wide.eq(self.a + self.b), self.narrow.eq(self.a[:20] - self.b[:20])]
        return m


@pytest.mark.parametrize(
    ("least", "slices"),
    [(21, 1), *(pytest.param(*values, marks=pytest.mark.full) for values in ((0, 0), (31, 0), (20, 2)))],
)
def test_wide_sums_take_dsp_slices_where_it_is_asked(tmp_path, least, slices):
    (tmp_path / "top.il").write_text(rtlil.convert(Sum(), name="top", emit_src=False))
    design = synthesise(tmp_path / "top.il", "xc7", {}, least)
    assert count_cells(design["modules"]["top"]["cells"]).dsp == slices


@pytest.mark.parametrize(
    ("expression", "signed"),
    [("a[25:0] + b[25:0]", ""), ("a[25:0] + b[19:0]", ""), ("a - b[11:0]", ""), ("a - b", "signed"),
     ("a + b[11:0]", "signed"), ("b - a", "")],
)  # fmt: skip
def test_a_dsp_slice_adds_as_yosys_does(tmp_path, expression, signed):
    """Proven with Yosys' own model of a DSP48E1, for every input, and whatever its free bits are."""
    (tmp_path / "top.v").write_text(
        f"module top(input {signed} [29:0] a, input {signed} [29:0] b, output {signed} [31:0] y);"
        f" assign y = {expression}; endmodule"
    )
    passes = [
        "read_verilog top.v", "proc", "copy top made", "rename top gold", "cd made",
        f"techmap -map {DSP_ADDER} -D DSP_ADDER_BITS=20", "select -assert-count 1 t:DSP48E1", "cd ..",
        "setundef -anyseq made", "read_verilog +/xilinx/cells_sim.v", "hierarchy", "proc", "flatten made",
        "opt -full made",
        "miter -equiv -flatten gold made miter", "sat -verify -prove trigger 0 miter",
    ]  # fmt: skip
    script = f"from pyosys import libyosys as y; d = y.Design()\nfor p in {passes!r}: y.run_pass(p, d)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_what_yosys_cannot_read_is_an_error_with_its_output(tmp_path):
    (tmp_path / "top.il").write_text("module \\top\n")
    with pytest.raises(ToolsError, match=r"(?s)failed .*yosys.log ends:"):
        synthesise(tmp_path / "top.il", "xc7", {})


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


@pytest.mark.full
def test_single_port_memories_are_joined_by_four(tmp_path):
    """nextpnr ends with an assertion where it packs a RAM64X1S."""
    (tmp_path / "top.il").write_text(rtlil.convert(Table(), name="top", emit_src=False))
    cells = synthesise(tmp_path / "top.il", "xc7", {})["modules"]["top"]["cells"]
    found = count_cells(cells)
    joined = [cell for cell in cells.values() if cell["type"] == "RAM64M"]
    assert not [name for name, cell in cells.items() if cell["type"] == "RAM64X1S"] and len(joined) == 2
    outputs = [cell["connections"][f"DO{letter}"] for cell in joined for letter in "ABCD" if
               f"DO{letter}" in cell["connections"]]  # fmt: skip
    assert len(outputs) == len({bit for bits in outputs for bit in bits}) == 6, "six bits, each from one part"
    for cell in joined:
        pins = cell["connections"]
        assert pins["ADDRA"] == pins["ADDRB"] == pins["ADDRC"] == pins["ADDRD"] and len(pins["ADDRA"]) == 6
        assert pins.keys() == cell["port_directions"].keys()
    assert found.lut >= 8


class Table(wiring.Component):
    """64 rows of six bits, read and written at one address."""

    address: In(6)
    write: In(1)
    i: In(6)
    o: Out(6)

    def elaborate(self, platform):
        m = Module()
        m.submodules.rows = rows = Memory(shape=6, depth=64, init=[])
        write, read = rows.write_port(), rows.read_port(domain="comb")
        m.d.comb += [write.addr.eq(self.address), read.addr.eq(self.address), write.data.eq(self.i)]
        m.d.comb += [write.en.eq(self.write), self.o.eq(read.data)]
        return m


def single_port(address, init="0"):
    pins = {**{f"A{place}": [address + place] for place in range(6)}, "D": [90], "O": [91], "WE": [92], "WCLK": [93]}
    directions = {pin: "output" if pin == "O" else "input" for pin in pins}
    return {"type": "RAM64X1S", "port_directions": directions, "connections": pins, "parameters": {"INIT": init}}


def test_memories_of_other_addresses_stay_apart():
    cells = {"a": single_port(2), "b": single_port(20), "c": single_port(2), "other": sink(91)}
    join_memories(cells)
    assert cells["other"] == sink(91) and cells.keys() == {"a", "b", "other"}
    assert cells["a"]["parameters"] == {"INIT_A": "0", "INIT_B": "0"} and cells["b"]["parameters"] == {"INIT_A": "0"}
    assert cells["b"]["connections"]["ADDRD"] == [20, 21, 22, 23, 24, 25]


def test_contents_of_memories_are_not_lost_silently():
    with pytest.raises(FormatError, match="memory a must begin with zeros"):
        join_memories({"a": single_port(2, "0100")})


def test_the_processors_urgent_requests_are_tied_low():
    cells = {"ps": {"type": "PS7", "connections": {"IRQF2P": [4]}, "port_directions": {"IRQF2P": "input"}},
             "own": {"type": "PS7", "connections": {"DDRARB": [5] * 4}, "port_directions": {}}}  # fmt: skip
    tie_processor(cells)
    assert cells["ps"]["connections"] == {"IRQF2P": [4], "DDRARB": ["0"] * 4}
    assert cells["ps"]["port_directions"]["DDRARB"] == "input"
    assert cells["own"]["connections"] == {"DDRARB": [5] * 4}, "what a design drives stays"
