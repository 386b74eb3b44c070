"""Histogram: a table of sums in block RAM, one bin added to or read and cleared in each cycle.

Cycle 0: address. Cycle 1: the bin comes. Cycle 2: add, write back. An item that meets the same bin one or two cycles
after another takes that one's sums instead of the table's, which does not have them yet.

Timing: latency LATENCY cycles from `bin` to `o`; one item a cycle, free-running.
Limits: the table is not reset; whoever uses it clears all bins first.
"""

from collections.abc import Mapping

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import delay, register

__all__ = ["Histogram"]


class Histogram(wiring.Component):
    """2^bin_bits bins of several sums each.

    Parameters: bin_bits; sums, width of each sum, which wraps, by name; amounts, width of what is added to it.

    Members
    -------
    bin : In, the bin of this cycle. amount : In, by name, what is added to its sums if `add`.
    add : In. clear : In, leave the bin at zero; not together with `add`.
    o : Out, by name, the bin's sums before that, LATENCY cycles later.
    """

    #: Cycles from `bin` to `o`.
    LATENCY = 2

    def __init__(self, bin_bits: int, sums: Mapping[str, int], amounts: Mapping[str, int]) -> None:
        self._sums = data.StructLayout(sums)
        super().__init__(
            {
                "bin": In(bin_bits),
                "amount": In(data.StructLayout(amounts)),
                "add": In(1),
                "clear": In(1),
                "o": Out(self._sums),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The table and its adders."""
        m = Module()
        table = Memory(shape=self._sums.size, depth=1 << len(self.bin), init=[], attrs={"ram_style": "block"})
        m.submodules.table = table
        read, write = table.read_port(), table.write_port()
        total, latest = Signal(self._sums), Signal(self._sums, reset_less=True)
        # Cycle 0.
        m.d.comb += read.addr.eq(self.bin)
        adds = Signal(2)  # by the item before this one, and the one before that
        place = [register(m, self.bin)]
        place.append(register(m, place[0]))
        m.d.sync += adds.eq(Cat(self.add | self.clear, adds))
        follows, after_next = (register(m, adds[k] & (self.bin == place[k])) for k in range(2))
        # Cycle 1.
        found = register(m, Mux(follows, total.as_value(), Mux(after_next, latest.as_value(), read.data)))
        # Cycle 2.
        before, clear = data.View(self._sums, found), delay(m, self.clear, 2)
        for name, _ in self._sums:
            amount = delay(m, Mux(self.add, self.amount[name], 0), 2)
            m.d.comb += total[name].eq(Mux(clear, 0, before[name]) + amount)
        m.d.sync += latest.eq(total)
        m.d.comb += [write.addr.eq(place[1]), write.data.eq(total), write.en.eq(adds[1]), self.o.eq(found)]
        return m
