"""Page merge: pages from several sources on the way into one channel, page by page.

Contract: a page's header leaves first, then its codewords, one for each bit of the header's `codewords`; no other page
in between. Pages of one source in order, sources round robin.

Timing: no latency; a page takes one cycle more than its codewords; back-pressure: yes.
"""

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import PageHeader
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.nand.interfaces import CodewordBeat

__all__ = ["PageMerge"]


class PageMerge(wiring.Component):
    """Merges the pages of two sources.

    Members
    -------
    i_page : array of two In streams of PageHeader. i : array of two In streams of CodewordBeat.
    o_page : Out stream of PageHeader. o : Out stream of CodewordBeat.
    """

    i_page: In(stream.Signature(PageHeader)).array(2)
    i: In(stream.Signature(CodewordBeat)).array(2)
    o_page: Out(stream.Signature(PageHeader))
    o: Out(stream.Signature(CodewordBeat))

    def elaborate(self, platform: object) -> Module:
        """A bit of `wanted` for each codeword that is still to come, the one at hand lowest."""
        m = Module()
        source, last, busy, wanted = Signal(), Signal(), Signal(), Signal(64)
        first, second = self.i_page
        m.d.comb += [
            source.eq(~first.valid | (second.valid & ~last)),
            self.o_page.valid.eq(~busy & (first.valid | second.valid)),
            self.o_page.payload.eq(Mux(source, Value.cast(second.payload), Value.cast(first.payload))),
            first.ready.eq(self.o_page.ready & ~busy & ~source),
            second.ready.eq(self.o_page.ready & ~busy & source),
        ]
        # While a codeword passes, `wanted` moves down to its bit: only its last beat has to wait for that.
        codeword = data.View(CodewordBeat, wire(m, Mux(last, *(Value.cast(i.payload) for i in reversed(self.i)))))
        passes = wire(m, busy & (wanted[0] | ~codeword.last))
        m.d.comb += [
            self.o.payload.eq(codeword),
            self.o.valid.eq(passes & Mux(last, self.i[1].valid, self.i[0].valid)),
            *(i.ready.eq(self.o.ready & passes & (last == k)) for k, i in enumerate(self.i)),
        ]
        end = wire(m, self.o.valid & self.o.ready & codeword.last)
        with m.If(self.o_page.valid & self.o_page.ready):
            m.d.sync += [last.eq(source), busy.eq(1), wanted.eq(self.o_page.payload.codewords)]
        with m.Elif(end | ~wanted[0]):
            m.d.sync += wanted.eq(wanted >> 1)
        with m.If(end):
            m.d.sync += busy.eq(wanted[1:].any())
        return m
