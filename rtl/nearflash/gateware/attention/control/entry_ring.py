"""Entry ring: heads take lines of the selection's store as they need them, and give them back in any order.

    i ─► newest turn: first line ─► base
              │                          give_back ─► turn of the context ─► ended
              └─► size by turn ─► oldest turn, ended? ─► free lines

Contract: a head's lines follow those of the head before it, modulo the store; i waits until there are enough, and a
turn. They are free when they and those of all heads before them were given back. A context gives back once for each
time that it took; what it gives back again counts for nothing. A reset frees all lines.

Timing: a head takes its lines a cycle after there is room, at the earliest the one after it asks, so that i.ready comes
from a register; `base` with i's transfer; lines are free 2 cycles after they were given back, those of a head a cycle;
back-pressure: yes.
Limits: a head that takes more than there are waits for ever.
"""

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, TOKEN_BITS, ContextPulse

__all__ = ["LINE_BITS", "LINE_ENTRIES_LOG2", "EntryRing", "LineTake"]

LINE_ENTRIES_LOG2 = 2
"""log2 of the entries of a line."""
LINE_BITS = TOKEN_BITS + 4 - LINE_ENTRIES_LOG2
"""Bits of a number of lines: those of eight query heads."""


class LineTake(data.Struct):
    """A head takes lines of four entries."""

    context: CONTEXT_BITS
    lines: LINE_BITS


class EntryRing(wiring.Component):
    """Ring of `lines` lines.

    Parameters
    ----------
    contexts : heads in flight at most, a power of two. lines : a power of two.

    Members
    -------
    i : In stream of LineTake. base : Out, the head's first line, as i is taken. waits : Out, a cycle late: there is no
    room for i.
    give_back : In, array of two ContextPulse.
    """

    def __init__(self, contexts: int, lines: int) -> None:
        self.turns, self.lines = max(2, contexts), lines
        super().__init__(
            {
                "i": In(stream.Signature(LineTake)),
                "base": Out(range(lines)),
                "waits": Out(1),
                "give_back": In(ContextPulse).array(2),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Take at the newest end; free at the oldest one."""
        m = Module()
        m.submodules.sizes = sizes = Memory(shape=range(self.lines + 1), depth=self.turns, init=[])
        write, read = sizes.write_port(), sizes.read_port(domain="comb")
        free, first_line, i = Signal(range(self.lines + 1), init=self.lines), Signal(range(self.lines)), self.i.payload
        newest, oldest, used = Signal(range(self.turns)), Signal(range(self.turns)), Signal(range(self.turns + 1))
        ended, takes, frees, has_room = Signal(self.turns), Signal(), Signal(), Signal()
        asks = self.i.valid & ~self.i.ready
        # A turn stays taken while an older one is held, whatever its own context does meanwhile.
        m.d.comb += has_room.eq((i.lines <= free) & (used != self.turns))
        # Room only grows until something is taken, so that what was seen a cycle ago holds.
        m.d.sync += [self.i.ready.eq(asks & has_room), self.waits.eq(asks & ~has_room)]
        m.d.comb += [
            self.base.eq(first_line),
            takes.eq(self.i.valid & self.i.ready),
            frees.eq((used != 0) & ended.bit_select(oldest, 1)),
            write.addr.eq(newest),
            write.data.eq(i.lines),
            write.en.eq(takes),
            read.addr.eq(oldest),
        ]
        m.d.sync += [
            free.eq(free - Mux(takes, i.lines, 0) + Mux(frees, read.data, 0)),
            used.eq(used + takes - frees),
            newest.eq(newest + takes),
            oldest.eq(oldest + frees),
        ]
        with m.If(takes):
            m.d.sync += [first_line.eq(first_line + i.lines), ended.bit_select(newest, 1).eq(0)]
        self._end(m, takes, newest, ended)
        return m

    def _end(self, m: Module, takes: Value, newest: Value, ended: Signal) -> None:
        """Turns end that contexts give back, if they hold one."""
        m.submodules.held_turns = held_turns = Memory(shape=range(self.turns), depth=self.turns, init=[])
        write, holds = held_turns.write_port(), Signal(self.turns)
        m.d.comb += [write.addr.eq(self.i.payload.context), write.data.eq(newest), write.en.eq(takes)]
        for pulse in self.give_back:
            read = held_turns.read_port(domain="comb")
            mine = holds.bit_select(pulse.context, 1)
            m.d.comb += read.addr.eq(pulse.context)
            with m.If(pulse.valid & mine):
                m.d.sync += [mine.eq(0), ended.bit_select(read.data, 1).eq(1)]
        with m.If(takes):
            m.d.sync += holds.bit_select(self.i.payload.context, 1).eq(1)
