"""Half buffer: one register between a producer and a consumer, for streams that rarely have an item.

Contract: items leave in order, none lost, none invented. `o.valid`, `o.payload` and `i.ready` all come from registers.
Reset empties it.

Timing: latency LATENCY cycles; an item every two cycles while o is ready; back-pressure: yes, after one item.
Limits: half the rate of a `SkidBuffer`, for half its registers and none of its multiplexers.
"""

from amaranth import Module
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["HalfBuffer"]


class HalfBuffer(wiring.Component):
    """One-entry buffer.

    Parameters
    ----------
    shape : payload shape.

    Members
    -------
    i : In stream of `shape`.
    o : Out stream of `shape`.
    """

    #: Cycles from a transfer on an empty buffer's `i` to the same item on `o`.
    LATENCY = 1

    def __init__(self, shape: ShapeLike) -> None:
        self.shape = shape
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        """An item is taken when there is none, so in no cycle in which one leaves."""
        m = Module()
        m.d.comb += self.i.ready.eq(~self.o.valid)
        with m.If(~self.o.valid):
            m.d.sync += [self.o.valid.eq(self.i.valid), self.o.payload.eq(self.i.payload)]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return m
