"""NandCommand player: ONFI command sequences as bus cycles, with the waits inside them.

    first ─► C1 C2 ─► R1 R2 R3 ─► second ─► wait ─► data ─► close        (each command has some of them)

Contract: a command is taken in the clock in which its last bus cycle ends; `i` must stand still until then. No command
follows data out within tRHW, no DATA command the last SELECT or COLUMN within tCCS; others may come between those.
What a lun does after a command is not waited for: that is the caller's business.

Timing: the first bus cycle is offered in the clock in which a command is; no clock is lost between bus cycles.
Source: ONFI 4.2, "Command Definition".
"""

import itertools
from dataclasses import dataclass
from typing import Any

from amaranth import Module, Mux, Signal
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.nand import NandTiming
from nearflash.gateware.nand.link import BEATS_BITS, BusCycle, CycleKind

__all__ = ["FORMS", "CommandKind", "CommandSequencer", "Form", "NandCommand"]


class CommandKind(enum.Enum, shape=4):
    """Command sequences."""

    READ = 0
    """Sense a page."""
    CACHE_READ = 1
    """Put the sensed page into the cache register and sense another one."""
    CACHE_END = 2
    """Put the sensed page into the cache register."""
    STATUS = 3
    STATUS_OF_ROW = 4
    """The same where luns share a chip enable: by a row address, to which the PHY adds the lun's bits."""
    SELECT = 5
    """Name page and column of the data that DATA will give."""
    COLUMN = 6
    """Name another column of the page named before."""
    DATA = 7
    PROGRAM = 8
    ERASE = 9
    RESET = 10


@dataclass(frozen=True)
class Form:
    """A command's cycles: command bytes, whether column and row are sent, the wait before data, which way data go."""

    first: int | None
    column: bool = False
    row: bool = False
    second: int | None = None
    wait: str = ""
    data: Any = None  # READ or WRITE
    close: int | None = None


FORMS = {
    CommandKind.READ: Form(0x00, column=True, row=True, second=0x30),
    CommandKind.CACHE_READ: Form(0x00, column=True, row=True, second=0x31),
    CommandKind.CACHE_END: Form(0x3F),
    CommandKind.STATUS: Form(0x70, wait="whr_ns", data=CycleKind.READ),
    CommandKind.STATUS_OF_ROW: Form(0x78, row=True, wait="whr_ns", data=CycleKind.READ),
    CommandKind.SELECT: Form(0x06, column=True, row=True, second=0xE0),
    CommandKind.COLUMN: Form(0x05, column=True, second=0xE0),
    CommandKind.DATA: Form(None, data=CycleKind.READ),
    CommandKind.PROGRAM: Form(0x80, column=True, row=True, wait="adl_ns", data=CycleKind.WRITE, close=0x10),
    CommandKind.ERASE: Form(0x60, row=True, second=0xD0),
    CommandKind.RESET: Form(0xFF),
}


class NandCommand(data.Struct):
    """One command sequence to one lun."""

    kind: CommandKind
    lun: 8
    column: 16
    row: 24
    beats: BEATS_BITS
    """Data beats; 1 for the status."""


class _Step(enum.Enum, shape=4):
    FIRST = 0
    COLUMN_LOW = 1
    COLUMN_HIGH = 2
    ROW_LOW = 3
    ROW_MIDDLE = 4
    ROW_HIGH = 5
    SECOND = 6
    DATA = 7
    CLOSE = 8


_FIRST_ADDRESS = 1


class CommandSequencer(wiring.Component):
    """Commands to bus cycles.

    Parameters
    ----------
    timing : the waits. clock_hz : of this clock.

    Members
    -------
    i : In stream of NandCommand.
    o : Out stream of BusCycle.
    settled : Out, a DATA command would not have to wait.
    """

    def __init__(self, timing: NandTiming, clock_hz: int) -> None:
        self.waits = {
            name: timing.cycles(getattr(timing, name), clock_hz) for name in ("whr_ns", "ccs_ns", "adl_ns", "rhw_ns")
        }
        super().__init__(
            {"i": In(stream.Signature(NandCommand)), "o": Out(stream.Signature(BusCycle)), "settled": Out(1)},
        )

    def elaborate(self, platform: object) -> Module:
        """One step after the other; a command's form says which step comes next."""
        m = Module()
        command, cycle = self.i.payload, self.o.payload
        step, following = Signal(_Step), Signal(_Step)
        over, moves = Signal(), Signal()
        longest = range(max(self.waits.values()) + 1)
        left = Signal(longest)  # clocks to wait before this step
        settle = Signal(longest)  # clocks until DATA may come
        wait = Signal(longest)  # that this command has before its data
        m.d.comb += [
            cycle.lun.eq(command.lun),
            cycle.beats.eq(command.beats),
            self.settled.eq(settle == 0),
            self.o.valid.eq(self.i.valid & Mux(command.kind == CommandKind.DATA, self.settled, left == 0)),
            moves.eq(self.o.valid & self.o.ready),
            self.i.ready.eq(moves & over),
        ]
        with m.Switch(command.kind):
            for kind, form in FORMS.items():
                with m.Case(kind):
                    self._follow(m, form, step, following, over, cycle)
                    m.d.comb += wait.eq(self.waits.get(form.wait, 0))
        self._address(m, step, command, cycle)

        with m.If(left != 0):
            m.d.sync += left.eq(left - 1)
        with m.If(settle != 0):
            m.d.sync += settle.eq(settle - 1)
        with m.If(moves):
            m.d.sync += step.eq(Mux(over, _Step.FIRST, following))
            with m.If(following == _Step.DATA):
                m.d.sync += left.eq(wait)
            with m.If(cycle.kind == CycleKind.READ):
                m.d.sync += left.eq(self.waits["rhw_ns"])
            with m.If((command.kind == CommandKind.SELECT) | (command.kind == CommandKind.COLUMN)):
                m.d.sync += settle.eq(self.waits["ccs_ns"])
        return m

    def _follow(self, m: Module, form: Form, step: Signal, following: Signal, over: Signal, cycle: data.View) -> None:
        """Command bytes of `form`, the step after each of its steps, and whether that was the last one."""
        if form.first is None:  # data are all there is
            m.d.comb += [over.eq(1), cycle.kind.eq(form.data)]
            return
        columns = [_Step.COLUMN_LOW, _Step.COLUMN_HIGH] if form.column else []
        rows = [_Step.ROW_LOW, _Step.ROW_MIDDLE, _Step.ROW_HIGH] if form.row else []
        second, close = [_Step.SECOND] * (form.second is not None), [_Step.CLOSE] * (form.close is not None)
        steps = [_Step.FIRST, *columns, *rows, *second, *[_Step.DATA] * (form.data is not None), *close]
        m.d.comb += over.eq(step == steps[-1])
        with m.Switch(step):
            for here, there in itertools.pairwise(steps):
                with m.Case(here):
                    m.d.comb += following.eq(there)
        with m.Switch(step):
            for at, byte in ((_Step.FIRST, form.first), (_Step.SECOND, form.second), (_Step.CLOSE, form.close)):
                if byte is not None:
                    with m.Case(at):
                        m.d.comb += cycle.byte.eq(byte)
            if form.data is not None:
                with m.Case(_Step.DATA):
                    m.d.comb += cycle.kind.eq(form.data)

    def _address(self, m: Module, step: Signal, command: data.View, cycle: data.View) -> None:
        address = [command.column[:8], command.column[8:], command.row[:8], command.row[8:16], command.row[16:]]
        for at, byte in enumerate(address, start=_FIRST_ADDRESS):
            with m.If(step == _Step(at)):
                m.d.comb += [cycle.kind.eq(CycleKind.ADDRESS), cycle.byte.eq(byte)]
