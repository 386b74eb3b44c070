"""The whole flow with its real programs, on a small design behind a real processor system; where they were fetched."""

from collections import Counter
from dataclasses import replace

import pytest
from amaranth import Cat, ClockDomain, ClockSignal, Instance, Module, Signal
from amaranth.back import rtlil
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from nearflash.abi.errors import BitstreamError, FormatError
from nearflash.boards.open.build import implement
from nearflash.boards.open.database import open_database
from nearflash.boards.open.decode.bitstream import decode_netlist, list_bits
from nearflash.boards.open.decode.cells import load_view, save_view
from nearflash.boards.open.decode.compare import check_bits
from nearflash.boards.open.decode.mutants import BitMutants, Mutant
from nearflash.boards.open.fasm import Feature
from nearflash.boards.open.packages import find_programs
from nearflash.device.bitstreams.board import Routing
from nearflash.device.bitstreams.header import split_bit

PART = "xc7z020clg400-1"
#: What an XC7Z020 is configured by (AMD UG470: 32,364,512 bits).
PAYLOAD_BYTES = 4_045_564


class Delayed(wiring.Component):
    """A counter at FCLK0 through a shift register in a LUT."""

    led: Out(1)

    def elaborate(self, platform):
        m = Module()
        m.domains.sync = ClockDomain(reset_less=True)
        clocks, count, line = Signal(4), Signal(3), Signal(9)
        m.submodules.ps7 = Instance("PS7", o_FCLKCLK=clocks)
        m.submodules.buffer = Instance("BUFG", i_I=clocks[0], o_O=ClockSignal())
        m.d.sync += [count.eq(Cat(~count[-1], count)), line.eq(Cat(count[0], line))]
        m.d.comb += self.led.eq(line[-1])
        return m


class Blinker(wiring.Component):
    """A counter at FCLK0, two shift registers of which one is longer than a primitive, and two DSP slices.

    One slice adds, without registers; the other one, with registers all along, multiplies what it has added.
    """

    led: Out(1)

    def elaborate(self, platform):
        m = Module()
        m.domains.sync = ClockDomain(reset_less=True)
        clocks, count, short, long = Signal(4), Signal(30), Signal(8), Signal(40)
        other, total, left, right = Signal(30), Signal(30), Signal(17), Signal(17)
        product, result = Signal(34), Signal(34)
        m.submodules.ps7 = Instance("PS7", o_FCLKCLK=clocks)
        m.submodules.buffer = Instance("BUFG", i_I=clocks[0], o_O=ClockSignal())
        m.d.sync += [count.eq(Cat(~count[-1] ^ count[2], count)), other.eq(Cat(other[-1] ^ ~other[5], other))]
        m.d.sync += [short.eq((short << 1) | count[-1]), long.eq((long << 1) | short[-1])]
        m.d.comb += total.eq(count + other)
        m.d.sync += [left.eq(total[13:]), right.eq(count[13:]), product.eq(left * right), result.eq(product)]
        m.d.comb += self.led.eq(long[-1] ^ short[-1] ^ result[-1])
        return m


@pytest.fixture(scope="module")
def database():
    programs = find_programs()
    if programs is None:
        pytest.skip("programs of Debian sid were not fetched: make bitstream fetches them")
    return open_database(programs, PART)


@pytest.fixture(scope="module")
def build(tmp_path_factory, database):
    """Runs the flow on a design, the blinker: what it made."""
    programs = find_programs()

    def run(design=Blinker):
        source = tmp_path_factory.mktemp("flow") / "top.il"
        source.write_text(rtlil.convert(design(), name="top", emit_src=False))
        routing = Routing(140_000_000, 1, dsp_adder_bits=28, slice_delays=True)
        return implement(programs, database, source, "xc7", {"led": "R14"}, routing)

    return run


@pytest.fixture(scope="module")
def made(build):
    return build()


def steps_of(made):
    """Kind and delay, ns, of each step of the critical path, but for the skew of clocks."""
    steps = [(step.split()[2], float(step.split()[0])) for step in made.routed.critical_path]
    return [step for step in steps if step[0] != "clk-skew"]


def test_a_small_design_reads_back_without_a_differing_bit(made):
    assert made.routed.fmax_hz > 150_000_000
    assert made.cells.ff >= 60 and made.cells.lut >= 3 and made.cells.dsp == 2
    assert steps_of(made)[0][0] == "clk-to-q"
    header = split_bit(made.bitstream)[0]
    assert (header.design, header.part, header.payload_bytes) == ("top", PART, PAYLOAD_BYTES)


@pytest.mark.full
def test_equal_sources_give_equal_files(build, made):
    assert build().bitstream.read_bytes() == made.bitstream.read_bytes()


def test_the_bits_decode_to_the_routed_netlist(made):
    kinds = Counter(cell.kind for cell in made.places.values())
    assert kinds["FF"] >= 60 and kinds["SRL"] == 3 and kinds["DSP48E1"] == 2 and kinds["PS7"] == 1
    processor = next(cell for cell in made.places.values() if cell.kind == "PS7")
    assert {processor.inputs[f"DDRARB{bit}"] for bit in range(4)} == {"0"}
    for cell in (cell for cell in made.places.values() if cell.kind == "DSP48E1"):
        pins = [f"INMODE{bit}" for bit in range(5)] + ["ALUMODE2", "ALUMODE3", "OPMODE6"]
        assert [cell.inputs[pin] for pin in pins] == ["0"] * 8
    assert load_view(save_view(made.places)) == made.places


def test_a_pin_without_a_driver_is_an_error_by_name(made, database):
    """Regression: eight pins of each DSP slice were open, and their inverters on; nothing saw it."""
    bits = list_bits(find_programs(), database, made.bitstream)
    key = next(key for key, cell in made.places.items() if cell.kind == "DSP48E1")
    tile, number = key.partition("/")[0], key[-len("0.DSP48E1")]
    feature = Feature(tile, f"DSP_{number}_INMODE3.DSP_GND_{tile[4]}")
    with pytest.raises(BitstreamError, match=rf"must have a driver, .* not {key.rpartition('.')[0]}.INMODE3: tie it"):
        check_bits(database, bits - {(bit.frame, bit.word, bit.bit) for bit in database.bits(feature)}, made.places)


def test_another_netlist_and_other_bits_are_errors(made, database):
    bits = list_bits(find_programs(), database, made.bitstream)
    key, cell = next((key, cell) for key, cell in made.places.items() if cell.kind == "LUT")
    other = {**made.places, key: replace(cell, config={"table": cell.config["table"] ^ 1})}
    with pytest.raises(BitstreamError, match=rf"routed netlist, but 1 places differ: {key} \(table is"):
        check_bits(database, bits, other)
    with pytest.raises(FormatError, match="each set bit must belong to a feature of xc7z020clg400-1, but 1 do not"):
        check_bits(database, bits | {(0x400000, 0, 31)}, made.places)


def test_every_flip_of_a_used_bit_is_seen(made, database):
    bits = list_bits(find_programs(), database, made.bitstream)
    netlist = decode_netlist(database, bits)
    mutants = BitMutants(netlist, netlist.cells(), bits)
    drawn = mutants.sample(60)
    kinds = Counter("INIT" in mutant.feature for mutant in drawn)
    assert kinds[True] >= 10 and kinds[False] == 30, "of tables and of pips"
    assert [mutant for mutant in drawn if not mutants.is_seen(mutant)] == []
    elsewhere = Mutant(drawn[0].tile, drawn[0].feature, drawn[-1].used_by)
    assert not mutants.is_seen(elsewhere), "a place that does not use the bit is as before"


def test_each_dsp_slice_has_the_delays_of_its_registers(made):
    # Regression: all slices had the delays of the slowest, so that paths passed through those with registers.
    steps = steps_of(made)
    assert [kind for kind, _ in steps] == ["clk-to-q", "routing", "logic", "routing", "setup"]
    assert steps[2][1] in (2.06, 2.08), "of the slice that adds: from B or A to P"
    assert steps[4][1] == 0.36, "of the slice that multiplies"


@pytest.mark.full
def test_a_shift_register_in_a_lut_has_its_clock_to_output(build):
    # Regression: nextpnr timed no path that begins at a memory or a shift register in a LUT.
    assert steps_of(build(Delayed))[0] == ("clk-to-q", 1.47), "prjxray's slicem.sdf: 1.472"


def test_both_models_agree_on_a_small_design(made):
    # Regression: nextpnr had 145.7 MHz for a design whose decoded netlist has 89.7.
    assert made.timing.fmax_hz == pytest.approx(made.routed.fmax_hz, rel=0.05)
    assert made.timing.hold_violations == 0 and len(made.timing.periods_ps) > 60
