"""Page router: between the page mover and the ports of all channels.

Contract: operations go to the channel that they name; results and wanted pages come with their channel's number, those
of lower channels first. An item of `o_wanted` or `o_result` may give way to one of a lower channel until it is taken.
Page data go to and come from the channel `at`.

Timing: no latency (combinational, valid and ready); back-pressure: yes.
"""

from typing import Any

from amaranth import Cat, Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nand.codeword import TaggedBeat
from nearflash.gateware.nand.interfaces import CHANNEL_BITS
from nearflash.gateware.nand.operation import NandOperation, NandResult
from nearflash.gateware.nand.pages.port import PagePortSignature, PageWanted

__all__ = ["ChannelOperation", "ChannelPage", "ChannelResult", "PageRouter"]


class ChannelOperation(data.Struct):
    """An operation, and its channel."""

    channel: CHANNEL_BITS
    item: NandOperation


class ChannelResult(data.Struct):
    """A result, and its channel."""

    channel: CHANNEL_BITS
    item: NandResult


class ChannelPage(data.Struct):
    """A wanted page, and its channel."""

    channel: CHANNEL_BITS
    item: PageWanted


class PageRouter(wiring.Component):
    """Routes operations, results and pages.

    Parameters
    ----------
    channels : of the kernel, 1 to 16.

    Members
    -------
    active : In, as in PagePortSignature.
    i_operation : In stream of ChannelOperation. rooms : Out, a bit a channel: it would take an operation.
    o_result : Out stream of ChannelResult. o_wanted : Out stream of ChannelPage.
    at : In. i_program : In stream of 64 bits, to that channel. o_sealed : Out stream of TaggedBeat, from that channel.
    channel : array of Out PagePortSignature.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(
            {
                "active": In(1),
                "i_operation": In(stream.Signature(ChannelOperation)),
                "rooms": Out(channels),
                "o_result": Out(stream.Signature(ChannelResult)),
                "o_wanted": Out(stream.Signature(ChannelPage)),
                "at": In(CHANNEL_BITS),
                "i_program": In(stream.Signature(64)),
                "o_sealed": Out(stream.Signature(TaggedBeat)),
                "channel": Out(PagePortSignature).array(channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Route by direction."""
        m = Module()
        operation = self.i_operation
        m.d.comb += [
            self.rooms.eq(Cat(port.operation.ready for port in self.channel)),
            operation.ready.eq(self.rooms.bit_select(operation.payload.channel, 1)),
        ]
        for index, port in enumerate(self.channel):
            m.d.comb += [
                port.active.eq(self.active),
                port.operation.payload.eq(operation.payload.item),
                port.operation.valid.eq(operation.valid & (operation.payload.channel == index)),
                port.program.payload.eq(self.i_program.payload),
                port.program.valid.eq(self.i_program.valid & (self.at == index)),
                port.sealed.ready.eq(self.o_sealed.ready & (self.at == index)),
            ]
        with m.Switch(self.at):
            for index, port in enumerate(self.channel):
                with m.Case(index):
                    m.d.comb += [
                        self.i_program.ready.eq(port.program.ready),
                        self.o_sealed.valid.eq(port.sealed.valid),
                        self.o_sealed.payload.eq(port.sealed.payload),
                    ]
        self._choose(m, self.o_result, [port.result for port in self.channel])
        self._choose(m, self.o_wanted, [port.wanted for port in self.channel])
        return m

    def _choose(self, m: Module, o: Any, streams: list[Any]) -> None:
        """The first one that has anything."""
        m.d.comb += o.valid.eq(Cat(one.valid for one in streams).any())
        # Reversed, as the last statement wins: the lowest channel goes first.
        for index, one in reversed(list(enumerate(streams))):
            with m.If(one.valid):
                m.d.comb += o.payload.channel.eq(index)
        with m.Switch(o.payload.channel):
            for index, one in enumerate(streams):
                with m.Case(index):
                    m.d.comb += [o.payload.item.eq(one.payload), one.ready.eq(o.ready)]
