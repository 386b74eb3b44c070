"""Request router: from the walkers to the channels and to the memory source.

Contract: requests of one walker to one destination leave in order; each leaves once. A request to memory goes to
o_memory whatever its channel; one to NAND to the output of its channel.

Timing: latency 1 cycle; back-pressure: yes. A destination that is not ready holds all walkers back.
"""

from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.config import AttendConfig
from nearflash.gateware.attn.interfaces import PageRequest, RoutedRequest
from nearflash.gateware.stream.merge import Merge

__all__ = ["RequestRouter"]


class RequestRouter(wiring.Component):
    """Routes page requests.

    Parameters
    ----------
    config : build configuration.
    count : walkers, at least 2.

    Members
    -------
    i : array of `count` In streams of RoutedRequest.
    o : array of `config.channels` Out streams of PageRequest.
    o_memory : Out stream of RoutedRequest.
    """

    def __init__(self, config: AttendConfig, count: int = 2) -> None:
        self.count = count
        super().__init__(
            {
                "i": In(stream.Signature(RoutedRequest)).array(count),
                "o": Out(stream.Signature(PageRequest)).array(config.channels),
                "o_memory": Out(stream.Signature(RoutedRequest)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The merge's register, and a valid for each destination."""
        m = Module()
        m.submodules.merge = merge = Merge(RoutedRequest, self.count)
        for index in range(self.count):
            wiring.connect(m, wiring.flipped(self.i[index]), merge.i[index])
        item = merge.o.payload.item
        m.d.comb += [
            self.o_memory.payload.eq(item),
            self.o_memory.valid.eq(merge.o.valid & item.request.memory),
        ]
        with m.If(item.request.memory):
            m.d.comb += merge.o.ready.eq(self.o_memory.ready)
        for index, o in enumerate(self.o):
            mine = ~item.request.memory & (item.channel == index)
            m.d.comb += [o.payload.eq(item.request), o.valid.eq(merge.o.valid & mine)]
            with m.If(mine):
                m.d.comb += merge.o.ready.eq(o.ready)
        return m
