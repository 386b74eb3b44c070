"""HeadSums: sums of terms, all and selected ones, of each query head.

Timing: one addition a cycle, in the cycle in which it is asked for; `o` in the same cycle as its slot.
"""

from amaranth import Module, Mux
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import TERM_BITS
from nearflash.gateware.attention.engine.interfaces import HEAD_BITS, TOKEN_BITS

__all__ = ["SUM_BITS", "HeadSums"]

SUM_BITS = TERM_BITS + TOKEN_BITS


class HeadSums(wiring.Component):
    """Two sums a head.

    Members
    -------
    slot : In, head, and above it whether it is the sum of the selected.
    add : In, `amount` is added to the slot's sum; `fresh` : In, it becomes the sum.
    o : Out, the slot's sum.
    """

    slot: In(HEAD_BITS + 1)
    add: In(1)
    fresh: In(1)
    amount: In(TERM_BITS + 2)
    o: Out(SUM_BITS)

    def elaborate(self, platform: object) -> Module:
        """LUT RAM, read and written in one cycle."""
        m = Module()
        m.submodules.table = table = Memory(shape=SUM_BITS, depth=1 << len(self.slot), init=[])
        read, write = table.read_port(domain="comb"), table.write_port()
        m.d.comb += [
            read.addr.eq(self.slot),
            write.addr.eq(self.slot),
            write.data.eq(Mux(self.fresh, 0, read.data) + self.amount),
            write.en.eq(self.add),
            self.o.eq(read.data),
        ]
        return m
