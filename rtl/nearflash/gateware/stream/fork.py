"""Stream fork: every output gets every item, each at its own pace.

Contract: an item is taken from `i` in the cycle in which the last output takes its copy; until then each output that
already has its copy shows no valid item. Order is kept. Reset forgets which outputs were served.

Timing: latency 0 cycles (combinational, i to o and o.ready to i.ready); one item a cycle while all are ready;
back-pressure: yes, by the slowest output.
"""

from amaranth import Cat, Module, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Fork"]


class Fork(wiring.Component):
    """Copy one stream to `count` streams.

    Parameters
    ----------
    shape : payload shape.
    count : number of outputs, at least 1.

    Members
    -------
    i : In stream of `shape`.
    o : array of `count` Out streams of `shape`.

    Raises
    ------
    ValueError : `count` is less than 1.
    """

    #: Cycles from `i` to `o`.
    LATENCY = 0

    def __init__(self, shape: ShapeLike, count: int) -> None:
        if count < 1:
            raise ValueError(f"count must be at least 1 output, not {count!r}")
        self.count = count
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape)).array(count)})

    def elaborate(self, platform: object) -> Module:
        """Keep one `served` bit per output; no output waits for another one."""
        m = Module()
        served = Signal(self.count)
        taken = Signal(self.count)
        for bit, o in enumerate(self.o):
            m.d.comb += [o.payload.eq(self.i.payload), o.valid.eq(self.i.valid & ~served[bit])]
        m.d.comb += [taken.eq(served | Cat(o.ready for o in self.o)), self.i.ready.eq(taken.all())]
        with m.If(self.i.valid):
            m.d.sync += served.eq(0)
            with m.If(~self.i.ready):
                m.d.sync += served.eq(taken)
        return m
