"""LUN table: what each NAND lun is doing, and which one wants the bus.

A lun's record holds its phase and the time at which it is to be looked at again. While nothing is found, `scan` goes
from lun to lun, one a clock; a lun that wants the bus stops it, and its record stands on `found` until the caller
writes a new one (`update`). In between, the caller may `peek` at another lun's record and change it.

    START ─► RESET ─► IDLE ─► SENSE ─┬──────────────► READY ─► IDLE
                       │             └► TURN ─► READY ─► CHAIN ─► TURN …        (with cache reads)
                       └► WORK ─► IDLE                                          (program, erase)

Reset takes `luns` clocks and leaves all luns in START: they are reset before anything else (ONFI 4.2, "Reset").
"""

from amaranth import Module, Mux, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import data, enum, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

__all__ = ["TICK_LOG2", "TRIES_MAX", "LunPhase", "LunTable", "lun_record"]

TICK_LOG2 = 4
"""Times are in ticks of this many clocks (as a power of two)."""
TRIES_MAX = 31
"""Polls that may find a lun busy before it counts as dead."""


class LunPhase(enum.Enum, shape=3):
    """Phase of a lun."""

    START = 0
    """It has to be reset."""
    RESET = 1
    IDLE = 2
    SENSE = 3
    """A page is sensed."""
    TURN = 4
    """A sensed page goes into the cache register."""
    READY = 5
    """The page of its first job can be read out."""
    CHAIN = 6
    """That page was read out; the next one, sensed behind it, has to go into the cache register."""
    WORK = 7
    """Program or erase."""


def lun_record(time_bits: int) -> data.StructLayout:
    """Layout of a record; `due` is in ticks, modulo 2**time_bits."""
    return data.StructLayout(
        {
            "phase": LunPhase,
            "behind": 1,  # a page is sensed behind the one in the cache register; in WORK: it is an erase
            "failed": 1,  # the page of the first job never came
            "tries": range(TRIES_MAX + 1),
            "due": time_bits,
        }
    )


class LunTable(wiring.Component):
    """Records of `luns` luns.

    Parameters
    ----------
    luns : their number. time_bits : width of times; waits must stay below half of what it can count.

    Members
    -------
    now : Out, time in ticks.
    lun : Out, whose record `record` is: `peek_unit` while `peek`, else the scanned one. The caller gives its `jobs`
        (it has any) and `operation` (one waits for it) in the same clock.
    found : Out, a lun wants the bus; `found_unit`, `found_record` say which one and its record, from registers.
    due : Out, whether the time of `found_record` has come.
    update : In, write `new` as the record of the lun found, and look for another one.
    change : In, write `new` as the record of the lun peeked at; if it is the one found, it is looked for again.
    """

    def __init__(self, luns: int, time_bits: int) -> None:
        self.luns, self.time_bits = luns, time_bits
        record: ShapeLike = lun_record(time_bits)
        super().__init__(
            {
                "now": Out(time_bits),
                "lun": Out(range(luns)),
                "record": Out(record),
                "jobs": In(1),
                "operation": In(1),
                "found": Out(1),
                "found_unit": Out(range(luns)),
                "found_record": Out(record),
                "due": Out(1),
                "peek": In(1),
                "peek_unit": In(range(luns)),
                "update": In(1),
                "change": In(1),
                "new": In(record),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One read port that scans or peeks, one write port that updates or changes."""
        m = Module()
        record = lun_record(self.time_bits)
        m.submodules.records = records = Memory(shape=record.size, depth=self.luns, init=[])
        read, write = records.read_port(domain="comb"), records.write_port()
        clearing, scan = Signal(init=1), Signal(range(self.luns))
        clock = Signal(TICK_LOG2 + self.time_bits)
        wants, here = Signal(), Signal(record)
        m.d.sync += clock.eq(clock + 1)
        m.d.comb += [
            self.now.eq(clock[TICK_LOG2:]),
            self.lun.eq(Mux(self.peek, self.peek_unit, scan)),
            read.addr.eq(self.lun),
            self.record.eq(read.data),
            here.eq(read.data),
            self.due.eq(~(self.now - self.found_record.due)[self.time_bits - 1]),
        ]

        # A lun wants the bus when it is due, and, where it does nothing, when there is something for it to do.
        with m.Switch(here.phase):
            with m.Case(LunPhase.START, LunPhase.CHAIN):
                m.d.comb += wants.eq(1)
            with m.Case(LunPhase.IDLE):
                m.d.comb += wants.eq(~here.failed & (self.jobs | self.operation))
            with m.Case(LunPhase.READY):
                m.d.comb += wants.eq(0)
            with m.Default():
                m.d.comb += wants.eq(~(self.now - here.due)[self.time_bits - 1])

        with m.If(~self.peek & ~self.found):
            m.d.sync += [
                scan.eq(Mux(scan == self.luns - 1, 0, scan + 1)),
                self.found.eq(wants & ~clearing),
                self.found_unit.eq(scan),
                self.found_record.eq(here),
            ]
            with m.If(scan == self.luns - 1):
                m.d.sync += clearing.eq(0)
        with m.If(self.update | (self.change & (self.peek_unit == self.found_unit))):
            m.d.sync += self.found.eq(0)
        m.d.comb += [
            write.addr.eq(Mux(self.change, self.peek_unit, Mux(clearing, scan, self.found_unit))),
            write.data.eq(Mux(clearing, 0, self.new)),
            write.en.eq(self.update | self.change | clearing),
        ]
        return m
