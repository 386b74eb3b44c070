"""HeadMaxima: floor of the largest logit of each query head of each context, and whether one was out of range.

Timing: latency LATENCY cycles from `i` to `o`; one item a cycle, free-running.
Limits: not reset; a context's heads are cleared before their first score.
"""

from amaranth import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import HEAD_BITS
from nearflash.gateware.attention.select.entry import FLOOR_BITS, EntryRow, Order
from nearflash.gateware.attention.select.helpers import larger, strobe
from nearflash.gateware.fp.pipeline import delay, register

__all__ = ["HeadMaxima"]

_LEAST = -(1 << FLOOR_BITS - 1)
_WORD = data.StructLayout({"top": signed(FLOOR_BITS), "outside": 1})


class HeadMaxima(wiring.Component):
    """Maxima of `contexts` contexts with eight query heads each.

    Members
    -------
    i : In, EntryRow; valid : In.
    top, outside : Out, the head's, without `i`, LATENCY cycles later.
    """

    #: Cycles from `i` to `top`.
    LATENCY = 2

    def __init__(self, contexts: int) -> None:
        self._contexts = contexts
        super().__init__({"i": In(EntryRow), "valid": In(1), "top": Out(signed(FLOOR_BITS)), "outside": Out(1)})

    def elaborate(self, platform: object) -> Module:
        """As in a histogram: an item takes what those one or two before it write."""
        m = Module()
        m.submodules.table = table = Memory(shape=_WORD.size, depth=self._contexts << HEAD_BITS, init=[])
        read, write = table.read_port(), table.write_port()
        total, latest = Signal(_WORD), Signal(_WORD, reset_less=True)
        # Cycle 0.
        place = [Cat(self.i.head, self.i.context)[: len(read.addr)]]
        place += [delay(m, place[0], 1), delay(m, place[0], 2)]
        writes = strobe(m, self.valid & (self.i.order != Order.LOAD), 2)
        m.d.comb += read.addr.eq(place[0])
        follows, after_next = (register(m, writes[k] & (place[0] == place[k + 1])) for k in range(2))
        # Cycle 1.
        found = register(m, Mux(follows, total.as_value(), Mux(after_next, latest.as_value(), read.data)))
        # Cycle 2.
        before, top, clear = data.View(_WORD, found), delay(m, self.i.top, 2), delay(m, self.i.order == Order.CLEAR, 2)
        m.d.comb += [
            total.top.eq(Mux(clear, _LEAST, larger(m, top, before.top))),
            total.outside.eq(~clear & (before.outside | delay(m, self.i.outside, 2))),
            Cat(self.top, self.outside).eq(found),
            write.addr.eq(place[2]),
            write.data.eq(total),
            write.en.eq(writes[1]),
        ]
        m.d.sync += latest.eq(total)
        return m
