"""Index queues: page requests of the scan wait by channel, so that a busy channel holds back none but its own.

    i ─► block RAM, a ring for each channel ─► o, from a channel that has room and score buffers

Contract: each request leaves once, those of one channel in order; `i` waits while its channel's ring is full. A block's
first request waits for a score buffer for each pass of its head, its others follow it. Channels without `room` are
passed over.

Timing: LATENCY cycles to `o` where its channel is the next one that is looked at, one a cycle; a request each 3 cycles;
back-pressure: yes, after PLACES requests to a channel. `o` comes from registers.
"""

from amaranth import Array, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory, WritePort
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.interfaces import BlockCredit
from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, RequestKind, RoutedRequest
from nearflash.gateware.fp.pipeline import register
from nearflash.gateware.nand.interfaces import CHANNEL_BITS

__all__ = ["INDEX_ROWS_MAX", "IndexQueues", "IndexRequest"]

INDEX_ROWS_MAX = 32
"""Rows of an embedding page that a build can name."""
_PASSES_BITS = 4


class IndexRequest(data.Struct):
    """Source of a PageRequest of the index: 144 bits, two words of block RAM."""

    context: CONTEXT_BITS
    passes: _PASSES_BITS
    """Score buffers that its block takes."""
    index: 20
    block: 13
    page: 8
    expected: 9
    row_codewords: 3
    """Codewords of a row."""
    rows: INDEX_ROWS_MAX
    memory: 1
    address: 48


class RoutedIndexRequest(data.Struct):
    """An index request and its channel."""

    channel: CHANNEL_BITS
    request: IndexRequest


class IndexQueues(wiring.Component):
    """Queues of index requests.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    i : In stream of RoutedIndexRequest, a block's requests one behind the other.
    room : In, by channel, the router has a place for it.
    credit_valid, credit : In, broadcast of BlockCredit.
    o : Out stream of RoutedRequest (of any source).
    """

    #: Requests that wait for one channel.
    PLACES = 64
    LATENCY = 4

    def __init__(self, config: AttendConfig) -> None:
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(RoutedIndexRequest)),
                "room": In(config.channels),
                "credit_valid": In(1),
                "credit": In(BlockCredit),
                "o": Out(stream.Signature(RoutedRequest)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A channel is looked at; its first request is read; it goes, or the next channel is looked at."""
        m = Module()
        channels = self.config.channels
        m.submodules.words = words = Memory(shape=IndexRequest, depth=channels * self.PLACES, init=[])
        read, at, goes = words.read_port(), Signal(range(channels)), Signal()
        first = read.data
        levels, places = self._rings(m, words.write_port(), at, goes)
        left = Array(Signal(9, name=f"left_{k}") for k in range(channels))  # of the block that has begun to leave
        fits = self._count_buffers(m, at, first, goes & (left[at] == 0))

        some = Cat(level.any() for level in levels)
        m.d.comb += read.addr.eq(Cat(places[at], at))
        # Cleared first: a request that goes in this cycle is set below and wins.
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.FSM():
            with m.State("LOOK"):
                m.d.comb += read.en.eq(1)
                with m.If((some & self.room).bit_select(at, 1) & (~self.o.valid | self.o.ready)):
                    m.next = "READ"
                with m.Else():
                    m.d.sync += at.eq(_following(at, channels))
            with m.State("READ"):
                m.next = "SEND"
            with m.State("SEND"):
                # A block that has begun has its buffers: its other requests must go, or it would never end.
                m.d.comb += goes.eq((left[at] != 0) | fits)
                m.d.sync += at.eq(_following(at, channels))
                with m.If(goes):
                    m.d.sync += [self.o.valid.eq(1), left[at].eq(Mux(left[at] == 0, first.expected, left[at]) - 1)]
                m.next = "LOOK"
        self._send(m, at, first, goes)
        return m

    def _rings(self, m: Module, write: WritePort, at: Signal, goes: Signal) -> tuple[list[Signal], Array]:
        """Requests come and go; how many there are and where the first one is, by channel."""
        channels, item = range(self.config.channels), self.i.payload
        levels = [Signal(range(self.PLACES + 1), name=f"level_{k}") for k in channels]
        newest = Array(Signal(range(self.PLACES), name=f"newest_{k}") for k in channels)
        oldest = Array(Signal(range(self.PLACES), name=f"oldest_{k}") for k in channels)
        full = Cat(level == self.PLACES for level in levels)
        m.d.comb += [
            self.i.ready.eq(~full.bit_select(item.channel, 1)),
            write.en.eq(self.i.valid & self.i.ready),
            write.addr.eq(Cat(newest[item.channel], item.channel)),
            write.data.eq(item.request),
        ]
        for k, level in enumerate(levels):
            comes, leaves = write.en & (item.channel == k), goes & (at == k)
            # Both may happen in one cycle.
            m.d.sync += level.eq(level + comes - leaves)
            with m.If(comes):
                m.d.sync += newest[k].eq(newest[k] + 1)
            with m.If(leaves):
                m.d.sync += oldest[k].eq(oldest[k] + 1)
        return levels, oldest

    def _count_buffers(self, m: Module, at: Signal, first: data.View, begun: Value) -> Signal:
        """Score buffers in use, by channel. True a clock after a request was read if there are enough for it."""
        m.submodules.passes = passes = Memory(shape=_PASSES_BITS, depth=1 << CONTEXT_BITS, init=[])
        write, read = passes.write_port(), passes.read_port(domain="comb")
        m.d.comb += [
            write.addr.eq(first.context),
            write.data.eq(first.passes),
            # Kept by context for the credit, which names the context alone.
            write.en.eq(begun),
            read.addr.eq(self.credit.context),
        ]
        returned, channel = Signal(_PASSES_BITS), register(m, self.credit.channel)
        m.d.sync += returned.eq(Mux(self.credit_valid, read.data, 0))
        used = Array(Signal(5, name=f"used_{k}") for k in range(self.config.channels))
        for k, count in enumerate(used):
            taken = Mux(begun & (at == k), first.passes, 0)
            # Taken and given back in one cycle add up; the credit is a register late, on the safe side.
            m.d.sync += count.eq(count + taken - Mux(channel == k, returned, 0))
        fits = Signal()
        m.d.sync += fits.eq(used[at] + first.passes <= self.config.score_blocks)
        return fits

    def _send(self, m: Module, at: Signal, first: data.View, goes: Signal) -> None:
        """Fill the output register."""
        o, rows = self.o.payload, first.rows
        spread = [Cat(row.replicate(width) for row in rows)[:INDEX_ROWS_MAX] for width in (1, 1, 2, 3, 4)]
        same = ("context", "index", "block", "page", "expected", "rows", "memory", "address")
        with m.If(goes):
            m.d.sync += [
                o.channel.eq(at),
                o.request.kind.eq(RequestKind.INDEX),
                o.request.codewords.eq(Array(spread)[first.row_codewords]),
                *(o.request[name].eq(first[name]) for name in same),
            ]


def _following(at: Signal, count: int) -> Value:
    return Mux(at == count - 1, 0, at + 1)
