"""Pair merge: four streams of sorted pairs to groups of dense values, W parameters a cycle.

    i_0 … i_3 ─► pairs of this group ─► lanes ─► o
    i_tile ─► released ─┘

Pairs are sorted and sent out round robin, so that the at most W ≤ 4 pairs of a group wait at different streams: every
group takes one cycle, however many pairs it has.

Contract: a command of n parameters gives ceil(n / W) groups, the last one with `last`; parameters without a pair are
zero. Its tiles come on `i_tile`, the last one with `last`. Of a tile with pairs every stream has some, in ascending
groups, and at the end one with `last`, which need not be there. Before pairs of a group go, all streams are looked at.
What is inside from the command before is dropped when a command is taken.

Timing: latency LATENCY cycles from a tile on `i_tile`, PAIR_LATENCY from pairs where they come later; one group a
cycle, and one cycle more for a tile whose last pairs lie in two rows and one group; back-pressure: yes.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.topk import TILE_BITS
from nearflash.gateware.coding.kept_net import equal, keep_net
from nearflash.gateware.fp.pipeline import select_digit, wire
from nearflash.gateware.gradients.pair_demux import Pair
from nearflash.gateware.gradients.tiles import Tile
from nearflash.gateware.gradients.values import ROW_PAIRS

__all__ = ["PairMerge"]


class PairMerge(wiring.Component):
    """Merges pairs into groups of `lanes` parameters.

    Parameters
    ----------
    lanes : parameters a cycle, 1, 2 or 4.

    Members
    -------
    i_params : In stream of the number of parameters, not 0; taken when the groups of the one before were.
    i_tile : In stream of Tile.
    i_0, i_1, i_2, i_3 : In streams of Pair.
    o : Out stream of struct {data: lanes · 32 bits, last: 1}.
    idle : Out, all groups were taken.

    Raises
    ------
    ValueError : another number of lanes.
    """

    #: Cycles from a tile on `i_tile` to its first group.
    LATENCY = 2
    #: Cycles from pairs to their group.
    PAIR_LATENCY = 1

    def __init__(self, lanes: int) -> None:
        if lanes not in (1, 2, 4):
            raise ValueError(f"lanes must be 1, 2 or 4, not {lanes!r}")
        self.lanes = lanes
        self._lane_bits = lanes.bit_length() - 1
        super().__init__(
            {
                "i_params": In(stream.Signature(32)),
                "i_tile": In(stream.Signature(Tile)),
                **{f"i_{k}": In(stream.Signature(Pair)) for k in range(ROW_PAIRS)},
                "o": Out(stream.Signature(data.StructLayout({"data": FP32.bits * lanes, "last": 1}))),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A group goes with its pairs; behind a tile's last group may be pairs of its row that are not there."""
        m = Module()
        group = Signal(TILE_BITS - self._lane_bits, reset_less=True)
        stop = Signal.like(group)  # one beyond the last tile's last group
        busy = Signal()
        active = Signal()  # a tile is being merged
        last = Signal()  # it is the last one
        pairs_left = Signal()  # it has some
        done = Signal(ROW_PAIRS)  # these streams have none of it left
        step, goes, ready, final, ends = Signal(), Signal(), Signal(), Signal(), Signal()
        heads = [getattr(self, f"i_{k}") for k in range(ROW_PAIRS)]
        places = [head.payload.place for head in heads]
        same = wire(m, Cat(*(equal(m, place.index[self._lane_bits :], group) for place in places)) & ~done)
        there = Cat(place.there for place in places)
        lasts = Cat(place.last for place in places)
        pops = Signal(ROW_PAIRS)
        gone = wire(m, done | (pops & lasts))
        idle = ~there & ~done & Cat(1, gone[:-1])  # not there, and those of its row have gone: pairs leave in order
        settled = wire(m, (Cat(head.valid for head in heads) | done).all())
        m.d.comb += [
            pops.eq(((same & there) | idle) & (goes & pairs_left).replicate(ROW_PAIRS)),
            ready.eq(self.o.ready | ~self.o.valid),
            step.eq(active & ready & (~pairs_left | settled)),
            goes.eq(step | (~active & settled)),
            final.eq(last & (equal(m, (group + 1)[: len(group)], stop))),
            ends.eq(goes & gone.all()),
            Cat(head.ready for head in heads).eq(pops),
            self.idle.eq(~(busy | self.o.valid)),
        ]
        self._lanes(m, wire(m, same & there & pairs_left.replicate(ROW_PAIRS)), heads, ready)
        with m.If(ready):
            m.d.sync += [self.o.valid.eq(step), self.o.payload.last.eq(final)]
        with m.If(step):
            m.d.sync += group.eq(group + 1)
        m.d.sync += done.eq(gone)
        with m.If(ends):
            m.d.sync += [pairs_left.eq(0), done.eq(0)]

        # A tile is taken when there is none, or with the last group of the one before, once that has no pairs left.
        over = wire(m, step & group.all())
        m.d.comb += self.i_tile.ready.eq(busy & (~active | (over & ~last)) & (~pairs_left | ends))
        with m.If(over | (step & final)):
            m.d.sync += active.eq(0)
        with m.If(self.i_tile.ready & self.i_tile.valid):
            m.d.sync += [active.eq(1), last.eq(self.i_tile.payload.last), pairs_left.eq(self.i_tile.payload.pairs)]
        with m.If(step & final):
            m.d.sync += busy.eq(0)

        m.d.comb += self.i_params.ready.eq(self.idle)
        with m.If(self.i_params.valid & self.idle):
            m.d.sync += stop.eq((self.i_params.payload + (self.lanes - 1))[self._lane_bits :])
            m.d.sync += [busy.eq(1), group.eq(0), last.eq(0), active.eq(0), pairs_left.eq(0), done.eq(0)]
        return m

    def _lanes(self, m: Module, hits: Signal, heads: list[Any], ready: Signal) -> None:
        """Each value in the lane that the low bits of its index name, which no other one of its group has."""
        values = Signal(FP32.bits * self.lanes, reset_less=True)
        m.d.comb += self.o.payload.data.eq(values)
        for lane in range(self.lanes):
            mine = Cat(hits[k] & (head.payload.place.index[: self._lane_bits] == lane) for k, head in enumerate(heads))
            mine = wire(m, mine)
            which = keep_net(m, Cat(mine[1] | mine[3], mine[2] | mine[3]))
            value = select_digit(which, [head.payload.value for head in heads])
            with m.If(ready):
                m.d.sync += values.word_select(lane, FP32.bits).eq(Mux(mine.any(), value, 0))
