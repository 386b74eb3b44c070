"""Request router: from the walkers to the channels and to the memory source.

Contract: requests of one walker to one destination leave in order; each leaves once. A request to memory goes to
o_memory whatever its channel; one to NAND to the output of its channel.

A destination without room holds back only the walkers whose next request is for it; of several that can go, the last
walker goes first. Give the last place to the one whose requests end heads, not to the one whose requests begin them.
While `hurry` the walker `yields` goes behind all others, and takes at most YIELDED places of a channel: scans end
sooner, so that the store of the selection has room for the next head's.

Timing: latency LATENCY cycles; one request a cycle; back-pressure: yes, after PLACES requests to a channel.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.engine.interfaces import PageRequest, RoutedRequest
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["RequestRouter"]


class RequestRouter(wiring.Component):
    """Routes page requests.

    Parameters
    ----------
    config : build configuration.
    count : walkers, at least 2. yields : number of the walker that goes last while `hurry`.

    Members
    -------
    i : array of `count` In streams of RoutedRequest.
    o : array of `config.channels` Out streams of PageRequest.
    o_memory : Out stream of RoutedRequest.
    room : Out, by channel, there is a place in its queue.
    hurry : In; only where a walker yields.
    """

    #: Requests that wait for a channel, beside those in its source. A block of the index goes to one channel at once.
    PLACES = 32
    YIELDED = 16
    LATENCY = 2

    def __init__(self, config: AttendConfig, count: int = 2, yields: int | None = None) -> None:
        self.count, self.yields = count, yields
        super().__init__(
            {
                **({} if yields is None else {"hurry": In(1)}),
                "i": In(stream.Signature(RoutedRequest)).array(count),
                "o": Out(stream.Signature(PageRequest)).array(config.channels),
                "o_memory": Out(stream.Signature(RoutedRequest)),
                "room": Out(config.channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The walkers' next requests; which of them can go; the destinations' queues."""
        m = Module()
        walkers = [StreamQueue(RoutedRequest, 2) for _ in self.i]
        channels = [StreamQueue(PageRequest, self.PLACES) for _ in self.o]
        memory = StreamQueue(RoutedRequest, 2)
        for name, queues in (("walker", walkers), ("channel", channels), ("memory", [memory])):
            for index, queue in enumerate(queues):
                m.submodules[f"{name}_{index}"] = queue
        for source, sink in (
            *((wiring.flipped(i), queue.i) for i, queue in zip(self.i, walkers, strict=True)),
            *((queue.o, wiring.flipped(o)) for o, queue in zip(self.o, channels, strict=True)),
            (memory.o, wiring.flipped(self.o_memory)),
        ):
            wiring.connect(m, source, sink)

        m.d.comb += self.room.eq(Cat(queue.i.ready for queue in channels))
        item, taken = Signal(RoutedRequest), Signal()
        cans = [Signal(name=f"can_{index}") for index, _ in enumerate(walkers)]
        if self.yields is not None:
            # Where no other goes. Nothing but its own `ready` needs to look at the others: paths stay short.
            m.d.comb += item.eq(walkers[self.yields].o.payload)
        for index, (queue, can) in enumerate(zip(walkers, cans, strict=True)):
            ahead = queue.o.payload
            room = Mux(ahead.request.memory, memory.i.ready, self.room.bit_select(ahead.channel, 1))
            goes, wins = queue.o.valid & room, can
            if index == self.yields:
                few = Cat(channel.level < self.YIELDED for channel in channels).bit_select(ahead.channel, 1)
                others = Cat(cans[:index], cans[index + 1 :]).any()
                last = goes & self.hurry & (few | ahead.request.memory)
                wins = goes & ~self.hurry
                goes = wins | (last & ~others)
                with m.If(last):
                    m.d.comb += taken.eq(1)
            m.d.comb += can.eq(goes)
            with m.If(wins):
                m.d.comb += [item.eq(ahead), taken.eq(1)]
            # The later walker wins: what it asks for lets heads end, and a full channel holds only its own requests.
            earlier = [other.o.ready for other in walkers[:index]]
            m.d.comb += queue.o.ready.eq(can)
            with m.If(wins):
                m.d.comb += [ready.eq(0) for ready in earlier]
        m.d.comb += [memory.i.payload.eq(item), memory.i.valid.eq(taken & item.request.memory)]
        for index, queue in enumerate(channels):
            mine = ~item.request.memory & (item.channel == index)
            m.d.comb += [queue.i.payload.eq(item.request), queue.i.valid.eq(taken & mine)]
        return m
