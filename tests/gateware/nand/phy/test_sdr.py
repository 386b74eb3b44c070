"""The SDR PHY between the controller's command sequencer and a NAND part's pins, in ONFI's timing modes."""

from dataclasses import replace

import numpy as np
import pytest
from amaranth import Module
from amaranth.back import rtlil
from amaranth.hdl import IOPort
from amaranth.lib import io, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator
from amaranth.vendor import XilinxPlatform

from nearflash.abi.nand import NandTiming
from nearflash.abi.onfi import SDR_MODES
from nearflash.gateware.nand.command_sequencer import CommandKind, CommandSequencer, NandCommand
from nearflash.gateware.nand.phy.sdr import NandPads, SdrClocks, SdrPhy
from nearflash.sim.nand.channel import NandViolation
from nearflash.sim.nand.sdr_pins import Pins, SdrNand

CLOCK_HZ, LUNS = 100_000_000, 2
BEATS = 3


def pads_of(luns=LUNS):
    return NandPads(
        io.SimulationPort("io", 8), io.SimulationPort("o", 1), io.SimulationPort("o", 1),
        *(io.SimulationPort("o", width, invert=True) for width in (1, 1, luns)),
    )  # fmt: skip


class Channel(wiring.Component):
    """Commands to pads."""

    i: In(stream.Signature(NandCommand))
    i_write: In(stream.Signature(64))
    o_read: Out(stream.Signature(64))

    def __init__(self, pads, clocks, waits):
        self.pads, self.clocks, self.waits = pads, clocks, waits
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        m.submodules.sequencer = sequencer = CommandSequencer(self.waits, CLOCK_HZ)
        m.submodules.phy = phy = SdrPhy(self.pads, self.clocks)
        wiring.connect(m, wiring.flipped(self.i), sequencer.i)
        wiring.connect(m, sequencer.o, phy.link.cycles)
        wiring.connect(m, wiring.flipped(self.i_write), phy.link.write)
        wiring.connect(m, phy.link.read, wiring.flipped(self.o_read))
        return m


def waits_of(timing):
    return NandTiming(1000, 1000, 1000, 10**8, adl_ns=timing.adl_ns, whr_ns=timing.whr_ns, ccs_ns=timing.ccs_ns,
                      rhw_ns=timing.rhw_ns)  # fmt: skip


class Bench:
    """Runs commands (kind, lun, row, beats, clocks after it), writes beats, and returns those read."""

    def __init__(self, mode, clocks=None, waits=None, stall=0):
        timing = SDR_MODES[mode]
        self.nand, self.pads, self.stall = SdrNand(timing, CLOCK_HZ, luns=LUNS), pads_of(), stall
        self.channel = Channel(self.pads, clocks or SdrClocks.of(timing, CLOCK_HZ), waits or waits_of(timing))

    def run(self, commands, written=()):
        found, left = [], list(written)
        channel, pads = self.channel, self.pads

        async def command(ctx):
            for kind, lun, row, beats, after in commands:
                payload = {"kind": kind, "lun": lun, "row": row, "column": 0, "beats": beats}
                ctx.set(channel.i.payload, payload)
                ctx.set(channel.i.valid, 1)
                taken = False
                while not taken:
                    _, _, taken = await ctx.tick().sample(channel.i.ready)
                ctx.set(channel.i.valid, 0)
                for _ in range(after + 1):
                    await ctx.tick()

        async def write(ctx):
            while True:
                for _ in range(self.stall + 1):
                    await ctx.tick()
                ctx.set(channel.i_write.payload, left[0] if left else 0)
                ctx.set(channel.i_write.valid, bool(left))
                taken = False
                while not taken:
                    _, _, taken = await ctx.tick().sample(channel.i_write.ready)
                left.pop(0)
                ctx.set(channel.i_write.valid, 0)

        async def read(ctx):
            while True:
                for _ in range(self.stall):
                    await ctx.tick()
                ctx.set(channel.o_read.ready, 1)
                _, _, valid, beat = await ctx.tick().sample(channel.o_read.valid, channel.o_read.payload)
                ctx.set(channel.o_read.ready, 0)
                if valid:
                    found.append(beat)

        async def part(ctx):
            while True:
                cle, ale, we_n, re_n, ce_n, dq, oe = (
                    ctx.get(signal)
                    for signal in (*(getattr(pads, name).o for name in ("cle", "ale", "we_n", "re_n", "ce_n")),
                                   pads.dq.o, pads.dq.oe)
                )  # fmt: skip
                ctx.set(pads.dq.i, self.nand.step(Pins(cle, ale, we_n, re_n, ce_n, dq if oe else None)))
                await ctx.tick()

        simulator = Simulator(channel)
        simulator.add_clock(1 / CLOCK_HZ)
        simulator.add_testbench(command)
        for background in (write, read, part):
            simulator.add_testbench(background, background=True)
        simulator.run()
        return found


BUSY = 220
"""Clocks for which a LUN is busy, and some more."""


def use_of(lun, row):
    """Erase, program, and read a page of a LUN; the status after each."""
    status = (CommandKind.STATUS, lun, row, 1, 0)
    return [
        (CommandKind.RESET, lun, 0, 0, BUSY), (CommandKind.ERASE, lun, row, 0, BUSY), status,
        (CommandKind.PROGRAM, lun, row, BEATS, 30), status, (CommandKind.STATUS, lun, row, 1, BUSY), status,
        (CommandKind.READ, lun, row, 0, BUSY), (CommandKind.SELECT, lun, row, 0, 0),
        (CommandKind.DATA, lun, 0, BEATS, 0), (CommandKind.COLUMN, lun, 0, 0, 0), (CommandKind.DATA, lun, 0, 1, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "stall"),
    [(0, 0), (5, 0), (5, 40), *(pytest.param(mode, 0, marks=pytest.mark.full) for mode in range(1, 5))],
)
def test_pages_go_to_the_part_and_back_and_no_rule_is_broken(mode, stall):
    beats = np.random.default_rng(mode).integers(0, 1 << 63, 2 * BEATS).tolist()
    bench = Bench(mode, stall=stall)
    found = bench.run(use_of(0, 5) + use_of(1, 9), beats)
    one, other = beats[:BEATS], beats[BEATS:]
    statuses = [beat & 0xFF for beat in (*found[:4], *found[4 + BEATS + 1 : 8 + BEATS + 1])]
    assert statuses == 2 * [0xE0, 0x80, 0x80, 0xE0]
    assert found[4 : 4 + BEATS + 1] == [*one, one[0]] and found[-BEATS - 1 :] == [*other, other[0]]
    assert bench.nand.luns[1].pages[9][: 8 * BEATS] == np.array(other, "<u8").tobytes()


def test_a_bad_block_fails_by_its_status():
    bench = Bench(5)
    bench.nand.bad_blocks.add((0, 1))
    found = bench.run(use_of(0, 5)[:7], range(BEATS))
    assert [beat & 0xFF for beat in found] == [0xE1, 0x81, 0x81, 0xE1]


TOO_FAST = {"tWP": {"low": 4}, "tWC": {"high": 4}, "tRP": {"strobe": 4}, "tRC": {"recover": 4}}


@pytest.mark.full
@pytest.mark.parametrize("symbol", TOO_FAST)
def test_a_phy_that_is_too_fast_is_noticed(symbol):
    clocks = replace(SdrClocks.of(SDR_MODES[0], CLOCK_HZ), **TOO_FAST[symbol])
    with pytest.raises(NandViolation, match=symbol):
        Bench(0, clocks).run(use_of(0, 5), range(BEATS))


@pytest.mark.full
@pytest.mark.parametrize("symbol", ["tADL", "tWHR", "tCCS", "tRHW"])
def test_a_controller_that_does_not_wait_is_noticed(symbol):
    waits = replace(waits_of(SDR_MODES[0]), **{f"{symbol[1:].lower()}_ns": 10})
    with pytest.raises(NandViolation, match=symbol):
        Bench(0, waits=waits).run(use_of(0, 5), range(BEATS))


def test_the_fastest_modes_parameters_break_the_slowest_mode():
    with pytest.raises(NandViolation):
        Bench(0, SdrClocks.of(SDR_MODES[5], CLOCK_HZ)).run(use_of(0, 5), range(BEATS))


def test_data_taken_too_early_are_wrong():
    clocks = replace(SdrClocks.of(SDR_MODES[5], CLOCK_HZ), access=1)
    found = Bench(5, clocks).run(use_of(0, 5)[:3])
    assert found[0] & 0xFF != 0xE0


def test_a_seven_series_part_has_its_cells_in_the_pads():
    class Board(XilinxPlatform):
        device, package, speed = "xc7z045", "ffg900", "2"
        resources, connectors, default_clk = (), (), None

    names = {"dq": 8, "cle": 1, "ale": 1, "we_n": 1, "re_n": 1, "ce_n": LUNS}
    ports = {
        name: io.SingleEndedPort(IOPort(width, name=name), direction="io" if name == "dq" else "o", invert="_n" in name)
        for name, width in names.items()
    }
    phy = SdrPhy(NandPads(**ports), SdrClocks.of(SDR_MODES[5], CLOCK_HZ))
    text = rtlil.convert(phy, platform=Board())
    assert text.count("cell \\IOBUF ") == 8 and text.count("cell \\OBUFT ") == 4 + LUNS
    assert text.count('attribute \\IOB "TRUE"') == 3 * 8 + 2 * (4 + LUNS)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="clock_hz must be one at which data are there 4 clocks after RE#"):
        SdrClocks.of(SDR_MODES[5], CLOCK_HZ, board_ns=20)
    with pytest.raises(ValueError, match="we_n must be an inverted port"):
        replace(pads_of(), we_n=io.SimulationPort("o", 1))
