"""Pair demux: rows of four indices, and later their values, to four streams of pairs, round robin.

    i_index ─► four index memories, block RAM ─┬─► o_0 … o_3
    i_value ─► four value memories, block RAM ─┘

Memory k holds pair k of every row, and each stream has a read position of its own: whoever takes pairs in their order
finds the next four of them at the streams, wherever a row ends, with no multiplexer of rows.

Contract: pair k of each row leaves on o_k, in order, when its value is there too; a tile's last row has `last`. Values
come after their indices, so that there is room for them; what takes a pair from o_3 has taken those of its row, or
takes them now. Pairs of a last row that are not `there` leave as well.
Reset empties the memories, which keep their words unseen.

Timing: latency LATENCY cycles from a row's values; a row of indices, of values and one pair of each stream a cycle;
back-pressure: yes, after ROWS rows of indices. i_index.ready and o_k.valid come from registers.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.topk import TILE_BITS, TILE_PARAMS
from nearflash.gateware.coding.kept_net import equal
from nearflash.gateware.gradients.tiles import IndexRow
from nearflash.gateware.gradients.values import ROW_PAIRS

__all__ = ["Pair", "PairDemux", "Place"]


class Place(data.Struct):
    """Place of a pair in its tile; whether it is there, and whether the tile has no further row."""

    index: TILE_BITS
    there: 1
    last: 1


class Pair(data.Struct):
    """A place and its value."""

    place: Place
    value: 32


class PairDemux(wiring.Component):
    """Round-robin demux of pairs.

    Members
    -------
    i_index : In stream of IndexRow. i_value : In stream of 4 · 32 bits, always ready.
    o_0, o_1, o_2, o_3 : Out streams of Pair.
    """

    #: Rows in the memories: those of a full tile.
    ROWS = TILE_PARAMS // ROW_PAIRS
    #: Cycles from a row's values to its pairs.
    LATENCY = 2

    def __init__(self) -> None:
        super().__init__(
            {
                "i_index": In(stream.Signature(IndexRow)),
                "i_value": In(stream.Signature(ROW_PAIRS * FP32.bits)),
                **{f"o_{k}": Out(stream.Signature(Pair)) for k in range(ROW_PAIRS)},
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Positions count to twice the rows, so that full and empty differ; the last stream is the last to read."""
        m = Module()
        written, valued, waiting = (
            Signal(range(2 * self.ROWS)),
            Signal(range(2 * self.ROWS)),
            Signal(range(self.ROWS + 1)),
        )
        room, push, pop = Signal(init=1), Signal(), Signal()
        m.d.comb += [self.i_index.ready.eq(room), push.eq(self.i_index.valid & room), self.i_value.ready.eq(1)]
        m.d.sync += [written.eq(written + push), valued.eq(valued + self.i_value.valid)]
        with m.If(push != pop):
            m.d.sync += [waiting.eq(waiting + Mux(pop, -1, 1)), room.eq(pop | (waiting != self.ROWS - 1))]

        row = self.i_index.payload
        for k in range(ROW_PAIRS):
            o = getattr(self, f"o_{k}")
            position, takes = Signal(range(2 * self.ROWS), name=f"position_{k}"), Signal(name=f"takes_{k}")
            place = Cat(row.index.word_select(k, TILE_BITS), row.there[k], row.last)
            value = self.i_value.payload.word_select(k, FP32.bits)
            for name, item, at, enable, found in (
                ("places", place, written, push, o.payload.place.as_value()),
                ("values", value, valued, self.i_value.valid, o.payload.value),
            ):
                m.submodules[f"{name}_{k}"] = memory = Memory(shape=len(item), depth=self.ROWS, init=[])
                write, read = memory.write_port(), memory.read_port()
                m.d.comb += [write.addr.eq(at), write.data.eq(item), write.en.eq(enable)]
                m.d.comb += [read.addr.eq(position), read.en.eq(takes), found.eq(read.data)]
            m.d.comb += takes.eq(~equal(m, position, valued) & (o.ready | ~o.valid))
            m.d.sync += position.eq(position + takes)
            with m.If(o.ready | ~o.valid):
                m.d.sync += o.valid.eq(takes)
        m.d.comb += pop.eq(takes)
        return m
