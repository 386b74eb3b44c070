"""Run finder: the codewords of a mask as runs of neighbours in one page.

Contract: for each mask the runs come in ascending order and hold each set bit exactly once; a run never goes on from
the first page (K) into the second (V), but else is as long as can be. The mask must not be zero.

Timing: one bit of the mask a clock, beside what the reader of the runs does; back-pressure: yes.
"""

from amaranth import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["CodewordMask", "CodewordRun", "RunFinder"]


class CodewordMask(data.Struct):
    """Codewords of a request."""

    codewords: 64
    page_log2: 3
    """log2 of the codewords of a page."""


class CodewordRun(data.Struct):
    """Codewords `number` to `number + count - 1` of a request."""

    number: 6
    place: 5
    """Place of the first one in its page."""
    count: 6
    second: 1
    """They lie in the request's second page."""
    fresh: 1
    """The first run in its page."""
    last: 1
    """The last run of the mask."""


class RunFinder(wiring.Component):
    """Masks to runs.

    Members
    -------
    i : In stream of CodewordMask; taken when the scan of the former mask is over.
    o : Out stream of Run.
    """

    i: In(stream.Signature(CodewordMask))
    o: Out(stream.Signature(CodewordRun))

    def elaborate(self, platform: object) -> Module:
        """Shift the mask to the right, bit after bit; a run ends where the next bit is clear or in the other page."""
        m = Module()
        mask = Signal(64)
        page_mask = Signal(6)  # place in the page, of a number
        run = Signal(CodewordRun)  # that grows
        number = Signal(6)  # of the mask's lowest bit
        seen = Signal()  # this page had a run already
        second = Signal()  # this is the second page
        bits = Signal(6)
        ends_page, last = Signal(), Signal()
        m.d.comb += [
            bits.eq(number & page_mask),
            ends_page.eq(bits == page_mask),
            last.eq(mask[1:] == 0),
            self.o.payload.eq(run),
            self.o.payload.count.eq(run.count + 1),
            self.o.payload.last.eq(last),
            self.o.payload.fresh.eq(~seen),
            self.o.payload.second.eq(second),
        ]
        with m.FSM():
            with m.State("LOAD"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [
                    mask.eq(self.i.payload.codewords),
                    page_mask.eq(Cat(self.i.payload.page_log2 > at for at in range(6))),
                ]
                m.d.sync += [number.eq(0), run.count.eq(0), seen.eq(0), second.eq(0)]
                with m.If(self.i.valid):
                    m.next = "SCAN"
            with m.State("SCAN"):
                step = Signal()
                m.d.comb += [
                    self.o.valid.eq(mask[0] & (~mask[1] | ends_page)),
                    step.eq(self.o.ready | ~self.o.valid),
                ]
                with m.If(run.count == 0):
                    m.d.comb += [
                        self.o.payload.number.eq(number),
                        self.o.payload.place.eq(bits),
                    ]
                with m.If(step):
                    m.d.sync += [mask.eq(mask[1:]), number.eq(number + 1)]
                    with m.If(self.o.valid):
                        m.d.sync += [run.count.eq(0), seen.eq(1)]
                    with m.Elif(mask[0]):
                        m.d.sync += [run.eq(self.o.payload)]
                    with m.If(ends_page):
                        m.d.sync += [seen.eq(0), second.eq(1)]
                    with m.If(last):
                        m.next = "LOAD"
        return m
