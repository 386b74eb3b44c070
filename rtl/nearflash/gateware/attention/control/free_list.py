"""Free list: numbers from 0 that are given out and come back.

Contract: before the first `start` nothing is free. After it the numbers 0 .. count - 1 are; each leaves on o once, and
again after it came back on i. i is always ready for a number that was given out. No number is out when `start` comes.

Timing: a number that comes back leaves at the earliest 1 cycle later; back-pressure: on o.
"""

from amaranth import Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["FreeList"]


class FreeList(wiring.Component):
    """List of free numbers.

    Parameters
    ----------
    most : numbers at most, at least 2. bits : of a number on the streams.

    Members
    -------
    start : In. count : In, numbers in use, up to `most`.
    i, o : streams of unsigned(bits).
    """

    def __init__(self, most: int, bits: int) -> None:
        self.most, self.bits = most, bits
        super().__init__(
            {
                "start": In(1),
                "count": In(range(most + 1)),
                "i": In(stream.Signature(bits)),
                "o": Out(stream.Signature(bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """First those that were never given out, then those that came back."""
        m = Module()
        m.submodules.back = back = ResetInserter(self.start)(StreamQueue(self.bits, self.most))
        fresh, left = Signal(range(self.most + 1), init=self.most), Signal()
        wiring.connect(m, wiring.flipped(self.i), back.i)
        m.d.comb += [
            left.eq(fresh < self.count),
            self.o.valid.eq(left | back.o.valid),
            self.o.payload.eq(back.o.payload),
            back.o.ready.eq(self.o.ready & ~left),
        ]
        with m.If(left):
            m.d.comb += self.o.payload.eq(fresh)
            with m.If(self.o.ready):
                m.d.sync += fresh.eq(fresh + 1)
        with m.If(self.start):
            m.d.sync += fresh.eq(0)
        return m
