"""Page merge: pages from several sources on the way into one channel, page by page.

Contract: a page's header leaves first, then its codewords, one for each bit of the header's `codewords`; no other page
in between. Pages of one source in order, sources round robin.

Timing: no latency; a page takes one cycle more than its codewords; back-pressure: yes.
"""

from amaranth import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attn.interfaces import CodewordBeat, PageHeader

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
        """A bit of `wanted` for each codeword that is still to come."""
        m = Module()
        source, last, wanted = Signal(), Signal(), Signal(64)
        with m.If(wanted == 0):
            with m.If(self.i_page[0].valid & (last | ~self.i_page[1].valid)):
                m.d.comb += source.eq(0)
            with m.Else():
                m.d.comb += source.eq(1)
        with m.Else():
            m.d.comb += source.eq(last)
        for index in range(2):
            with m.If(source == index):
                page, codeword = self.i_page[index], self.i[index]
                with m.If(wanted == 0):
                    m.d.comb += [self.o_page.valid.eq(page.valid), page.ready.eq(self.o_page.ready)]
                with m.Else():
                    m.d.comb += [self.o.valid.eq(codeword.valid), codeword.ready.eq(self.o.ready)]
                m.d.comb += [self.o_page.payload.eq(page.payload), self.o.payload.eq(codeword.payload)]
        with m.If(self.o_page.valid & self.o_page.ready):
            m.d.sync += [last.eq(source), wanted.eq(self.o_page.payload.codewords)]
        with m.If(self.o.valid & self.o.ready & self.o.payload.last):
            m.d.sync += wanted.eq(wanted & (wanted - 1))
        return m
