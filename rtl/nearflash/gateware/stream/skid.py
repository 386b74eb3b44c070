"""Skid buffer: cuts every combinational path between a producer and a consumer.

Contract: items leave in order, none lost, none invented. `o.valid`, `o.payload` and `i.ready` all come from registers.
Reset empties it.

Timing: latency LATENCY cycles; one item a cycle while o is ready; back-pressure: yes, one more item is taken after o
stalls.
Limits: costs two registers and a 2:1 multiplexer per payload bit, so cut wide beats at a `StreamQueue` instead.
"""

from amaranth import Module, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["SkidBuffer"]


class SkidBuffer(wiring.Component):
    """Two-entry buffer with registered outputs in both directions.

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
        """Keep one item in `o`; `spare` takes the item that arrives in the cycle in which `o` stalls."""
        m = Module()
        spare = Signal(self.shape, reset_less=True)
        spare_full = Signal()
        m.d.comb += self.i.ready.eq(~spare_full)

        with m.If(self.o.ready | ~self.o.valid):
            m.d.sync += [self.o.valid.eq(spare_full | self.i.valid), spare_full.eq(0)]
            with m.If(spare_full):
                m.d.sync += self.o.payload.eq(spare)
            with m.Else():
                m.d.sync += self.o.payload.eq(self.i.payload)
        with m.Elif(self.i.valid & self.i.ready):
            m.d.sync += [spare.eq(self.i.payload), spare_full.eq(1)]
        return m
