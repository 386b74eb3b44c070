"""Page delivery: pages from the memory source, as headers, page_tags of their codewords, and the way to their channels.

    i ─► codewords of the page, one by one ─┬─► o_page_tag (to the CRC check)
          └─► o_page[channel]               └─► channels, in order ──┐
    i_codeword (from the CRC check) ─────────────────────────────────┴─► o[channel]

Contract: a page's header leaves before its codewords; pages of one channel in order. A page that its channel does not
take holds the pages behind it back, also those of other channels.

Timing: one codeword a cycle on o_page_tag; no latency from i_codeword to o; back-pressure: yes.
"""

from amaranth import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import ContextRecord, PageHeader, RequestKind, RoutedHeader
from nearflash.gateware.nand.codeword import SealedTag
from nearflash.gateware.nand.interfaces import CHANNEL_BITS, CodewordBeat
from nearflash.gateware.stream.half import HalfBuffer
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["PageDelivery"]

_CODEWORDS_AHEAD = 32


class PageDelivery(wiring.Component):
    """Routes pages of the memory source.

    Parameters
    ----------
    channels : of the kernel. contexts : a power of two.

    Members
    -------
    i_context : In, {valid, record}: broadcast.
    i : In stream of RoutedHeader. i_codeword : In stream of CodewordBeat, of all pages' codewords in order.
    o_page_tag : Out stream of SealedTag, of all pages' codewords in order.
    o_page : array of `channels` Out streams of PageHeader. o : likewise, of CodewordBeat.
    """

    def __init__(self, channels: int, contexts: int) -> None:
        self.channels, self.contexts = channels, contexts
        super().__init__(
            {
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "i": In(stream.Signature(RoutedHeader)),
                "i_codeword": In(stream.Signature(CodewordBeat)),
                "o_page_tag": Out(stream.Signature(SealedTag)),
                "o_page": Out(stream.Signature(PageHeader)).array(channels),
                "o": Out(stream.Signature(CodewordBeat)).array(channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A header goes out, then its bits are walked over; codewords follow the queue of channels."""
        m = Module()
        m.submodules.ways = ways = StreamQueue(CHANNEL_BITS, _CODEWORDS_AHEAD)
        m.submodules.tag = tag = HalfBuffer(SealedTag)  # what checks pages is ready only after a long look
        wiring.connect(m, tag.o, wiring.flipped(self.o_page_tag))
        m.submodules.page_tags = page_tags = Memory(shape=64, depth=self.contexts, init=[])
        write, read = page_tags.write_port(), page_tags.read_port(domain="comb")
        wanted, number, channel = Signal(64), Signal(6), Signal(CHANNEL_BITS)
        page_tag, found = Signal(SealedTag), Signal()
        header = self.i.payload.header
        m.d.comb += [
            write.addr.eq(self.i_context.record.context),
            write.data.eq(self.i_context.record.page_tag),
            write.en.eq(self.i_context.valid),
            read.addr.eq(header.context),
            tag.i.payload.eq(page_tag),
            tag.i.payload.number.eq(number),
            ways.i.payload.eq(channel),
        ]
        with m.FSM():
            with m.State("SEND-HEADER"):
                m.d.sync += [
                    wanted.eq(header.codewords),
                    number.eq(0),
                    channel.eq(self.i.payload.channel),
                    # All of the header is kept: `i` shows the next page during the walk.
                    page_tag.page.page_tag.eq(read.data),
                    page_tag.page.index.eq(header.index),
                    page_tag.page.kind.eq(header.kind == RequestKind.INDEX),
                ]
                for index, o_page in enumerate(self.o_page):
                    mine = self.i.payload.channel == index
                    m.d.comb += [o_page.payload.eq(header), o_page.valid.eq(self.i.valid & mine)]
                    with m.If(mine):
                        m.d.comb += self.i.ready.eq(o_page.ready)
                with m.If(self.i.valid & self.i.ready):
                    m.next = "WALK"
            with m.State("WALK"):
                m.d.comb += [
                    # A page tag and its channel go together: of one alone the other's order would be lost.
                    tag.i.valid.eq(wanted[0] & ways.i.ready),
                    ways.i.valid.eq(wanted[0] & tag.i.ready),
                    # A codeword that is not wanted takes its cycle, too: its number counts.
                    found.eq(~wanted[0] | (tag.i.ready & ways.i.ready)),
                ]
                with m.If(found):
                    m.d.sync += [wanted.eq(wanted >> 1), number.eq(number + 1)]
                    with m.If(wanted[1:] == 0):
                        m.next = "SEND-HEADER"
        self._route(m, ways.o)
        return m

    def _route(self, m: Module, way: stream.Interface) -> None:
        """Codeword by codeword to its channel."""
        ready = Cat(o.ready for o in self.o).bit_select(way.payload, 1)
        m.d.comb += [
            self.i_codeword.ready.eq(way.valid & ready),
            # A channel keeps its turn to the codeword's last beat.
            way.ready.eq(self.i_codeword.valid & ready & self.i_codeword.payload.last),
        ]
        for index, o in enumerate(self.o):
            m.d.comb += [
                o.payload.eq(self.i_codeword.payload),
                o.valid.eq(self.i_codeword.valid & way.valid & (way.payload == index)),
            ]
