"""The model of NAND must name every broken rule, and keep to its part's times; driven cycle by cycle."""

from dataclasses import replace

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nand.link import BusCycle, CycleKind, NandLinkSignature
from nearflash.sim.nand.channel import NandModel, NandViolation, nand_header
from nearflash.sim.nand.parts import nand_part
from nearflash.sim.verilog import convert
from nearflash.verify.fixtures.nand_controller import NandLinkedUnit

CLOCK_HZ = 100_000_000
PART = replace(nand_part("slc-1400"), jitter=0.0, pages_per_block=4, blocks=8)
Line = data.StructLayout({"cycle": BusCycle, "wait": 20})


class Script(wiring.Component):
    """Bus cycles, each offered `wait` clocks after the one before has ended."""

    i: In(stream.Signature(Line))
    o: Out(stream.Signature(64))
    i_write: In(stream.Signature(64))
    link: Out(NandLinkSignature)

    def elaborate(self, platform):
        m = Module()
        waited = Signal(20)
        due = waited == self.i.payload.wait
        m.d.comb += [
            self.link.cycles.payload.eq(self.i.payload.cycle),
            self.link.cycles.valid.eq(self.i.valid & due),
            self.i.ready.eq(self.link.cycles.ready & due),
        ]
        wiring.connect(m, wiring.flipped(self.link.read), wiring.flipped(self.o))
        wiring.connect(m, wiring.flipped(self.i_write), wiring.flipped(self.link.write))
        with m.If(self.i.ready):
            m.d.sync += waited.eq(0)
        with m.Elif(self.i.valid & ~due):
            m.d.sync += waited.eq(waited + 1)
        return m


@pytest.fixture(scope="module")
def lun():
    return NandLinkedUnit(Script(), "test_nand_script", NandModel(PART, 2, CLOCK_HZ))


@pytest.fixture
def play(lun):
    """Runs a script and returns the beats read. Words: `78h`, an address byte, `R1`, `W69`; `+120` waits so many ns."""
    lun.channels[0].configure(replace(lun.channels[0].model, luns=1))
    lun.channels[0].configure(NandModel(PART, 2, CLOCK_HZ))

    def run(text, write=(), at=0):
        lines, wait, beats = [], 0, 0
        for word in text.split():
            if word.startswith("+"):
                wait += int(word[1:]) // 10
                continue
            kind = {"h": CycleKind.COMMAND, "R": CycleKind.READ, "W": CycleKind.WRITE}
            kind = kind.get(word[-1]) or kind.get(word[0]) or CycleKind.ADDRESS
            count = int(word[1:]) if word[0] in "RW" else 0
            byte = 0 if count else int(word.rstrip("h"), 16)
            beats += count if kind == CycleKind.READ else 0
            cycle = at | kind.value << 8 | byte << 10 | count << 18
            lines.append(cycle | wait << 30)
            wait = 0
        return lun.run({"i": lines, "i_write": write}, {"o": beats}, timeout_cycles=1_000_000)["o"]

    return run


START = "FFh +10000 "
READ = START + "00h 00 00 02 00 00 30h +4000 "
STATUS = "70h +120 R1"


def test_reads_back_what_was_loaded(lun, play):
    page = np.random.default_rng(1).integers(0, 256, PART.raw_page_bytes, np.uint8)
    lun.channels[0].load(0, np.array([2]), page[None])
    found = play(READ + "06h 08 00 02 00 00 E0h +300 R4 +100 05h 00 01 E0h +300 R1")
    assert found.tobytes() == page[8:40].tobytes() + page[256:264].tobytes()
    assert (play(READ + "06h 00 00 02 00 00 E0h +300 R2", at=1) == 2**64 - 1).all()  # another lun


@pytest.mark.parametrize(("wait_ns", "ready"), [(3_700, False), (3_900, True)])
def test_status_tells_when_a_page_is_there(play, wait_ns, ready):
    beats = play(START + f"00h 00 00 02 00 00 30h +{wait_ns} {STATUS}")
    assert bool(beats[-1] >> 6 & 1) == ready and bool(beats[-1] >> 5 & 1) == ready


def test_cache_reads_sense_behind(lun, play):
    pages = np.arange(2, dtype=np.uint8)[:, None] + np.zeros((1, 64), np.uint8)
    lun.channels[0].load(0, np.array([2, 3]), pages)
    select = "06h 00 00 {} 00 00 E0h +300 R1 +100 "
    found = play(
        READ + f"00h 00 00 03 00 00 31h +500 {STATUS} +100 " + select.format("02") + "3Fh +4500 " + select.format("03")
    )
    assert [int(beat) & 0xFF for beat in found] == [0xC0, 0, 1]  # ready, the array busy


def test_programs_and_erases(lun, play):
    program = "80h 00 00 05 00 00 +400 W2 10h +75000 70h +120 R1 +100 "
    assert play(START + program, write=[1, 2])[0] == 0xE0
    assert lun.channels[0].page(0, 5)[:16].view(np.uint64).tolist() == [1, 2]
    assert play(START + "60h 05 00 00 D0h +1000000 70h +120 R1")[0] == 0xE0
    assert (lun.channels[0].page(0, 5) == 0xFF).all()
    lun.channels[0].spoil(0, 1)
    assert play(START + program, write=[1, 2])[0] == 0xE1


def test_failures_that_are_asked_for(lun, play):
    program = "80h 00 00 {:02X} 00 00 +400 W1 10h +75000 70h +120 R1 +100 "
    lun.channels[0].fail(0, 1, programs=1, erases=1)
    assert play(START + program.format(4), write=[1])[0] == 0xE1
    assert play(START + program.format(5), write=[1])[0] == 0xE0
    for expected in (0xE1, 0xE0):
        assert play(START + "60h 05 00 00 D0h +1000000 70h +120 R1")[0] == expected


def test_the_mark_of_the_factory(lun, play):
    lun.channels[0].mark(0, 1)
    page = lun.channels[0].page(0, 4)
    assert page[PART.page_bytes] == 0 and page.sum() == 0xFF * (len(page) - 1)
    assert (lun.channels[0].page(0, 5) == 0xFF).all()
    assert play(START + "60h 05 00 00 D0h +1000000 70h +120 R1")[0] == 0xE1


def test_reads_disturb_until_the_block_is_erased(lun, play):
    lun.channels[0].configure(replace(lun.channels[0].model, disturb_reads=3))
    read = START + "00h 00 00 02 00 00 30h +4000 "
    errors = [lun.channels[0].statistics(clear=True).bit_errors for _ in range(7) if play(read) is not None]
    assert errors == [0, 0, 1, 1, 1, 2, 2]
    play(START + "60h 02 00 00 D0h +1000000 ")
    play(read)
    assert not lun.channels[0].statistics().bit_errors


def test_pages_of_a_block_are_programmed_once_and_upwards(lun, play):
    def program(row):
        return START + f"80h 00 00 {row:02X} 00 00 +400 W1 10h +75000 70h +120 R1"

    assert play(program(10), write=[1])[0] == 0xE0
    assert play(program(10), write=[2])[0] == play(program(9), write=[3])[0] == 0xE1
    assert lun.channels[0].page(0, 10)[:8].view(np.uint64) == [1]
    assert (lun.channels[0].page(0, 9) == 0xFF).all()
    assert play(program(11), write=[4])[0] == 0xE0
    assert play(program(16), write=[5])[0] == 0xE0  # of another block


VIOLATIONS = {
    "70h +120 R1": "FFh must be the first command, not 70h",
    START + "99h": "the command must be one of ONFI's, not 99h",
    "FFh +10 70h +120 R1": "tWB must pass before 70h",
    START + "70h +110 R1": "tWHR must pass before data move",
    READ + "06h 00 00 02 00 00 E0h +290 R1": "tCCS must pass before data move",
    READ + "06h 00 00 02 00 00 E0h +300 R1 +80 70h +120 R1": "tRHW must pass before a command follows data out",
    START + "80h 00 00 02 00 00 +390 W1": "tADL must pass before data move",
    READ + "06h 00 00 02 00 00 E0h +300 R569": "data out must end within the page, not at 4552",
    READ + "06h 00 00 03 00 00 E0h +300 R1": "E0h must name row 2, not 3",
    START + "00h 00 00 02 00 00 30h +1000 06h": "06h must wait until the lun is ready",
    START + "06h 00 00 02 00 00 E0h +300 R1": "E0h must follow a read",
    START + "00h 00 00 02 00 30h": "30h must follow 00h and 5 addresses",
    START + "00h 60h": "60h must not follow an unfinished 00h",
    START + "00h 00 00 40 00 00 30h": "the row must be below 32, not 64",
    START + "80h 00 00 02 00 00 10h": "10h must follow data",
    START + "12": "an address must follow a command",
    START + "3Fh": "3Fh must follow a read",
    START + "R1": "data out must follow E0h or a status command",
}  # fmt: skip


@pytest.mark.parametrize("script", VIOLATIONS)
def test_broken_rules_are_named(play, script):
    with pytest.raises(NandViolation) as raised:
        play(script, write=[0])
    assert str(raised.value).partition(" ns: ")[2] == VIOLATIONS[script]


def test_the_cycles_add_up(lun, play):
    lun.channels[0].statistics(clear=True)
    play(READ + "06h 00 00 02 00 00 E0h +300 R69")
    counted = lun.channels[0].statistics()
    parts = counted.data_cycles + counted.command_cycles + counted.wait_cycles + counted.idle_cycles
    assert parts == counted.cycles and counted.selects == counted.reads == counted.resets == 1
    assert counted.data_cycles == 5 + 69 + 1  # the preamble; a beat a clock, as 1.4 GB/s is more; its end
    assert counted.wait_cycles == 30 + 10  # tCCS, tRHW


def test_a_design_without_a_link_is_refused():
    class Nothing(wiring.Component):
        i: In(1)

        def elaborate(self, platform):
            return Module()

    with pytest.raises(ValueError, match="the design must have a NAND link"):
        nand_header(convert(Nothing()))


@pytest.mark.parametrize(
    ("values", "text"),
    [({"luns": 0}, "luns must be 1 to 256, not 0"), ({"bit_error_rate": 1.0}, "bit_error_rate must be within")],
)
def test_model_values_are_checked(values, text):
    with pytest.raises(ValueError, match=text):
        replace(NandModel(PART, 2, CLOCK_HZ), **values)


def test_pages_and_units_are_checked(lun):
    channel = lun.channels[0]
    with pytest.raises(ValueError, match="pages must be 1 of at most 4544 bytes"):
        channel.load(0, np.array([0]), np.zeros((1, 5000), np.uint8))
    with pytest.raises(ValueError, match="lun must be below 2, not 2"):
        channel.page(2, 0)
