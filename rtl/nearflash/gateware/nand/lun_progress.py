"""LUN progress: which command a lun wants next, and what its record becomes after a command.

Contract: a busy lun gets no command but status and reset. A lun that got a command is due when the command's time has
passed; one that was found busy is due again after a sixteenth of that time (RESET: all of it); one that was found busy
TRIES_MAX + 1 times is `late`: it has to be reset, and the page of its first job will not come. A page behind the one in
the cache register is not looked for before it can be there.

Timing: combinational.
"""

from typing import Any

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.nand import NandTiming
from nearflash.gateware.nand.command_sequencer import CommandKind
from nearflash.gateware.nand.luns import TICK_LOG2, TRIES_MAX, LunPhase, lun_record

__all__ = ["STATUS_FAIL", "STATUS_READY", "LunProgress"]

STATUS_FAIL, STATUS_READY = 0, 6
"""Bits of the status byte (ONFI 4.2, "Read Status")."""


class LunProgress(wiring.Component):
    """The rules of LunTable's records.

    Parameters
    ----------
    timing : of the part. clock_hz : of the clock whose ticks are counted.
    shared_enables : luns share chip enables: the status is asked by row.

    Members
    -------
    record : In, the lun's record. due : In, its time has come. now : In, time in ticks.
    operation, erase : In, an operation waits for it; it is an erase. more : In, it has at least two jobs.
    choice : Out, the command it wants.
    kind : In, the command that was played. status : In, what it read, for a status. jobs : In, the lun has any.
    new : Out, its new record.
    arrives : Out, the page of its first job is in its register, or never will be.
    ends : Out, its operation has ended. late : Out, it was busy for too long.
    """

    def __init__(self, timing: NandTiming, clock_hz: int, *, shared_enables: bool = False) -> None:
        self.timing, self.clock_hz = timing, clock_hz
        #: The command that asks for the status.
        self.status_kind = CommandKind.STATUS_OF_ROW if shared_enables else CommandKind.STATUS
        longest = max(timing.erase_ns, timing.program_ns, timing.read_ns, timing.reset_ns)
        #: Width of times in ticks.
        self.time_bits = self._ticks(longest).bit_length() + 1
        record: Any = lun_record(self.time_bits)
        inputs = {
            **{"record": record, "due": 1, "now": self.time_bits, "operation": 1, "erase": 1, "more": 1},
            **{"kind": CommandKind, "status": 8, "jobs": 1},
        }
        outputs = {"choice": CommandKind, "new": record, "arrives": 1, "ends": 1, "late": 1}
        super().__init__(
            {name: In(shape) for name, shape in inputs.items()} | {name: Out(shape) for name, shape in outputs.items()}
        )

    def _ticks(self, time_ns: int) -> int:
        # One more: the tick that has begun does not count.
        return -(-NandTiming.cycles(time_ns, self.clock_hz) >> TICK_LOG2) + 1

    def elaborate(self, platform: object) -> Module:
        """A command sets phase and time; a status moves on, tries again, or gives up."""
        m = Module()
        self._choose(m)
        old, new, timing = self.record, self.new, self.timing
        wait, base = Signal(self.time_bits), Signal(self.time_bits)
        m.d.comb += [new.eq(old), new.tries.eq(0), base.eq(self.now), new.due.eq(base + wait)]
        begun = {
            CommandKind.RESET: (LunPhase.RESET, 0, timing.reset_ns),
            CommandKind.READ: (LunPhase.SENSE, 0, timing.read_ns),
            CommandKind.CACHE_READ: (LunPhase.TURN, 1, timing.cache_busy_ns),
            CommandKind.CACHE_END: (LunPhase.TURN, 0, timing.cache_busy_ns),
            CommandKind.PROGRAM: (LunPhase.WORK, 0, timing.program_ns),
            CommandKind.ERASE: (LunPhase.WORK, 1, timing.erase_ns),
        }
        with m.Switch(self.kind):
            for kind, (phase, behind, time_ns) in begun.items():
                with m.Case(kind):
                    m.d.comb += [new.phase.eq(phase), new.behind.eq(behind), wait.eq(self._ticks(time_ns))]
            with m.Case(CommandKind.STATUS, CommandKind.STATUS_OF_ROW):
                with m.If(self.status[STATUS_READY]):
                    self._move_on(m, wait)
                with m.Elif(old.tries != TRIES_MAX):
                    m.d.comb += new.tries.eq(old.tries + 1)
                    self._try_again(m, wait)
                with m.Else():
                    m.d.comb += [self.late.eq(1), new.phase.eq(LunPhase.START), new.behind.eq(0)]
                    m.d.comb += self.ends.eq(old.phase == LunPhase.WORK)
                    # A lun that cannot be reset owes its jobs too.
                    m.d.comb += self.arrives.eq(~self.ends & self.jobs & ~old.failed)
                    m.d.comb += new.failed.eq(old.failed | self.arrives)
        # The page behind may still be sensed: only then does the turn begin.
        with m.If((old.phase == LunPhase.CHAIN) & ~self.due):
            m.d.comb += base.eq(old.due)
        return m

    def _choose(self, m: Module) -> None:
        with m.Switch(self.record.phase):
            with m.Case(LunPhase.START):
                m.d.comb += self.choice.eq(CommandKind.RESET)
            with m.Case(LunPhase.IDLE):
                m.d.comb += self.choice.eq(CommandKind.READ)
                with m.If(self.operation):
                    m.d.comb += self.choice.eq(Mux(self.erase, CommandKind.ERASE, CommandKind.PROGRAM))
            with m.Case(LunPhase.CHAIN):
                m.d.comb += self.choice.eq(CommandKind.CACHE_END)
                with m.If(self.more & ~self.operation):
                    m.d.comb += self.choice.eq(CommandKind.CACHE_READ)
            with m.Default():
                m.d.comb += self.choice.eq(self.status_kind)

    def _move_on(self, m: Module, wait: Signal) -> None:
        with m.Switch(self.record.phase):
            with m.Case(LunPhase.SENSE, LunPhase.TURN):
                # Due when the page behind, if there is one, will have been sensed.
                m.d.comb += [self.new.phase.eq(LunPhase.READY), wait.eq(self._ticks(self.timing.read_ns))]
                m.d.comb += self.arrives.eq(1)
            with m.Case(LunPhase.WORK):
                m.d.comb += [self.new.phase.eq(LunPhase.IDLE), self.new.behind.eq(0), self.ends.eq(1)]
            with m.Default():
                m.d.comb += self.new.phase.eq(LunPhase.IDLE)

    def _try_again(self, m: Module, wait: Signal) -> None:
        timing = self.timing
        with m.Switch(self.record.phase):
            with m.Case(LunPhase.WORK):
                erase, program = (self._ticks(time_ns // 16) for time_ns in (timing.erase_ns, timing.program_ns))
                m.d.comb += wait.eq(Mux(self.record.behind, erase, program))
            with m.Case(LunPhase.RESET):
                m.d.comb += wait.eq(self._ticks(timing.reset_ns))  # a dead lun must not fill the bus
            with m.Default():
                m.d.comb += wait.eq(self._ticks(timing.read_ns // 16))
