"""Stream merge: items of several inputs leave by one output, round robin.

Contract: every item leaves once, with the number of its input; those of one input in order. An item waits for at most
one of each other input. Reset drops the item in the output register.

Timing: latency LATENCY cycle; one item a cycle; back-pressure: yes. o comes from registers; the inputs' ready depend on
o.ready and on the valid of all inputs.
"""

from amaranth import Cat, Module, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Merge"]


class Merge(wiring.Component):
    """Merge `count` streams.

    Parameters
    ----------
    shape : payload shape of the inputs.
    count : inputs, at least 2.

    Members
    -------
    i : array of `count` In streams of `shape`.
    o : Out stream of struct {source: number of the input, item: `shape`}.

    Raises
    ------
    ValueError : `count` is less than 2.
    """

    #: Cycles from an item on an input to `o` when no other waits.
    LATENCY = 1

    def __init__(self, shape: ShapeLike, count: int) -> None:
        if count < 2:
            raise ValueError(f"count must be at least 2 inputs, not {count!r}")
        self.count = count
        item = data.StructLayout({"source": range(count), "item": shape})
        super().__init__({"i": In(stream.Signature(shape)).array(count), "o": Out(stream.Signature(item))})

    def elaborate(self, platform: object) -> Module:
        """The next input behind the last one that has an item."""
        m = Module()
        chosen, last, room = Signal(range(self.count)), Signal(range(self.count)), Signal()
        with m.Switch(last):
            for before in range(self.count):
                with m.Case(before):
                    for step in reversed(range(1, self.count + 1)):
                        with m.If(self.i[(before + step) % self.count].valid):
                            m.d.comb += chosen.eq((before + step) % self.count)
        m.d.comb += room.eq(self.o.ready | ~self.o.valid)
        with m.If(room):
            m.d.sync += self.o.valid.eq(Cat(i.valid for i in self.i).any())
            m.d.sync += [last.eq(chosen), self.o.payload.source.eq(chosen)]
        for index, i in enumerate(self.i):
            m.d.comb += i.ready.eq(room & (chosen == index))
            with m.If(room & (chosen == index)):
                m.d.sync += self.o.payload.item.eq(i.payload)
        return m
