"""StoreWalk: the order in which a pass reads a context's entries: rows of four, within a row the query heads.

Lines lie in that order too, from the context's first one on.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import HEAD_BITS, TOKEN_BITS
from nearflash.gateware.attention.select.keystore import LANES

__all__ = ["StoreWalk"]


class StoreWalk(wiring.Component):
    """Position within a pass.

    Members
    -------
    base, group, entries, local_entry : In, of the context, constant over a pass.
    rewind : In, to the first line. step : In, to the next line; past the last one it means nothing.
    address, head : Out. first_row, first_head, last_head, final : Out; `final`: the pass's last line.
    valid, local : Out, lanes that hold an entry; that lie in the local window.
    """

    def __init__(self, lines: int) -> None:
        super().__init__(
            {
                "base": In(range(lines)),
                "group": In(HEAD_BITS + 1),
                "entries": In(TOKEN_BITS),
                "local_entry": In(TOKEN_BITS),
                "rewind": In(1),
                "step": In(1),
                "address": Out(range(lines)),
                "head": Out(HEAD_BITS),
                "first_row": Out(1),
                "first_head": Out(1),
                "last_head": Out(1),
                "final": Out(1),
                "valid": Out(LANES),
                "local": Out(LANES),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Counters, and comparisons with the last entry and the first local one."""
        m = Module()
        row, last = Signal(TOKEN_BITS - 2), Signal(TOKEN_BITS)
        last_row, local_row = Signal(), row == self.local_entry[2:]
        # Constant during a pass: a register costs no cycle.
        m.d.sync += last.eq(self.entries - 1)
        m.d.comb += [
            last_row.eq(row == last[2:]),
            self.first_head.eq(self.head == 0),
            self.last_head.eq(self.head + 1 == self.group),
            self.final.eq(last_row & self.last_head),
            self.valid.eq(Cat(~last_row | (lane <= last[:2]) for lane in range(LANES))),
            self.local.eq(
                Cat(
                    (row > self.local_entry[2:]) | (local_row & (lane >= self.local_entry[:2])) for lane in range(LANES)
                )
            ),
        ]
        # Held back between passes, so that each begins at the context's first line.
        with m.If(self.rewind):
            m.d.sync += [self.address.eq(self.base), self.head.eq(0), row.eq(0), self.first_row.eq(1)]
        with m.Elif(self.step):
            m.d.sync += [self.address.eq(self.address + 1), self.head.eq(Mux(self.last_head, 0, self.head + 1))]
            with m.If(self.last_head):
                m.d.sync += [row.eq(row + 1), self.first_row.eq(0)]
        return m
