"""OrderFeed: puts orders between the scores: CLEAR for a context that begins, LOAD for one that is selected.

Contract: an order is eight items, one a query head; orders come only between the runs of a context's head. CLEAR goes
before LOAD. Reset forgets orders.

Timing: latency 0; back-pressure: yes.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, HEAD_BITS, ScoreRow
from nearflash.gateware.attention.select.entry import Order, ScoreItem

__all__ = ["OrderFeed"]

_REQUEST = data.StructLayout({"valid": 1, "context": CONTEXT_BITS})


class OrderFeed(wiring.Component):
    """Scores and orders.

    Members
    -------
    clear, load : In, {valid, context}: pulses; of a kind not before the eight items of the last one are out.
    i : In stream of ScoreRow. o : Out stream of ScoreItem.
    """

    clear: In(_REQUEST)
    load: In(_REQUEST)
    i: In(stream.Signature(ScoreRow))
    o: Out(stream.Signature(ScoreItem))

    def elaborate(self, platform: object) -> Module:
        """Keep what is pending, and whether a run is open."""
        m = Module()
        inside = Signal()
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += inside.eq(~self.i.payload.last)
        pending, contexts, heads = Signal(2), [], []
        for kind, request in enumerate((self.clear, self.load)):
            context, head = Signal(CONTEXT_BITS), Signal(HEAD_BITS)
            mine = pending[kind] & ~pending[:kind].any() & ~inside & self.o.ready
            with m.If(request.valid):
                m.d.sync += [pending[kind].eq(1), context.eq(request.context), head.eq(0)]
            with m.Elif(mine):
                m.d.sync += [head.eq(head + 1), pending[kind].eq(~head.all())]
            contexts.append(context)
            heads.append(head)
        orders, clears, o = pending.any() & ~inside, pending[0], self.o.payload
        m.d.comb += [
            self.i.ready.eq(self.o.ready & ~orders),
            self.o.valid.eq(self.i.valid | orders),
            o.eq(Cat(Order.SCORE, self.i.payload)),
        ]
        with m.If(orders):
            m.d.comb += [
                o.order.eq(Mux(clears, Order.CLEAR, Order.LOAD)),
                o.row.context.eq(Mux(clears, contexts[0], contexts[1])),
                o.row.head.eq(Mux(clears, heads[0], heads[1])),
            ]
        return m
