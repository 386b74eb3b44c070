"""Pair merge: rows of sorted pairs to groups of dense values, W parameters a cycle.

    i ─► window of two rows ─► pairs of this group ─► lanes ─► o
    i_tile ─► released ─────────────┘

Pairs are sorted and a row holds four, so that all pairs of a group of W ≤ 4 parameters lie in two rows: every group
takes one cycle, however many pairs it has. Below those of the second row lies one of the first row at least, so that
pair k of the second row belongs to a lane above k, or to a later group.

Contract: a command of n parameters gives ceil(n / W) groups, the last one with `last`; parameters without a pair are
zero. Each tile has rows of its own. With `failed` the rest of the groups hold zeros, and no pairs are looked at. What
is inside from the command before is dropped when a command is taken.

Timing: latency LATENCY cycles from a tile on `i_tile`, ROW_LATENCY from a row where that comes later; one group a
cycle, and one cycle more for a tile whose last pairs lie in two rows and one group; back-pressure: yes.
"""

from functools import reduce
from operator import or_
from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.topk import TILE_BITS
from nearflash.gateware.expand.tiles import IndexRow
from nearflash.gateware.expand.values import ROW_PAIRS
from nearflash.gateware.fp.pipeline import wire

__all__ = ["PairMerge", "PairRow"]


class PairRow(data.Struct):
    """Four pairs."""

    index: IndexRow
    value: ROW_PAIRS * FP32.bits


class PairMerge(wiring.Component):
    """Merges pairs into groups of `lanes` parameters.

    Parameters
    ----------
    lanes : parameters a cycle, 1, 2 or 4.

    Members
    -------
    i_params : In stream of the number of parameters; taken when the groups of the one before were.
    i_tile : In stream of one bit a tile: it has pairs.
    i : In stream of PairRow.
    failed : In, stands to the end of the command.
    o : Out stream of struct {data: lanes · 32 bits, last: 1}.
    idle : Out, all groups were taken.

    Raises
    ------
    ValueError : another number of lanes.
    """

    #: Cycles from a tile on `i_tile` to its first group.
    LATENCY = 2
    #: Cycles from a row on `i` to its first group.
    ROW_LATENCY = 3

    def __init__(self, lanes: int) -> None:
        if lanes not in (1, 2, 4):
            raise ValueError(f"lanes must be 1, 2 or 4, not {lanes!r}")
        self.lanes = lanes
        self._lane_bits = lanes.bit_length() - 1
        super().__init__(
            {
                "i_params": In(stream.Signature(32)),
                "i_tile": In(stream.Signature(1)),
                "i": In(stream.Signature(PairRow)),
                "failed": In(1),
                "o": Out(stream.Signature(data.StructLayout({"data": FP32.bits * lanes, "last": 1}))),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A group's pairs are those of the window whose index says so; none of them is of a group that has gone."""
        m = Module()
        rows = Signal(data.ArrayLayout(PairRow, 2), reset_less=True)
        full = Signal(2)
        groups_left = Signal(32, reset_less=True)
        group = Signal(TILE_BITS - self._lane_bits, reset_less=True)
        some = Signal()  # groups
        active = Signal()  # a tile is being merged
        pairs_left = Signal()  # it has pairs
        step, ready, lacks = Signal(), Signal(), Signal()
        first, second = rows[0].index, rows[1].index

        # Which pairs of the two rows lie in this group; those of the second row only where it is of the same tile.
        indices = Cat(first.index, second.index)
        there = Cat(first.there, second.there & (~first.last).replicate(ROW_PAIRS))
        hits = Signal(ROW_PAIRS + self.lanes - 1)
        for k in range(len(hits)):
            same = indices.word_select(k, TILE_BITS)[self._lane_bits :] == group
            m.d.comb += hits[k].eq(same & there[k] & pairs_left & ~self.failed)
        m.d.comb += [
            ready.eq(self.o.ready | ~self.o.valid),
            lacks.eq(pairs_left & (~full[0] | (~first.last & ~full[1]))),
            step.eq(some & ready & (self.failed | (active & ~lacks))),
            self.idle.eq(~(some | self.o.valid)),
        ]
        self._window(m, rows, full, pairs_left, hits, step)
        self._lanes(m, rows, hits, ready)
        with m.If(ready):
            m.d.sync += [self.o.valid.eq(step), self.o.payload.last.eq(groups_left == 1)]
        with m.If(step):
            m.d.sync += [group.eq(group + 1), groups_left.eq(groups_left - 1), some.eq(groups_left != 1)]

        # A tile is taken when there is none, or with the last group of the one before.
        m.d.comb += self.i_tile.ready.eq(some & (~active | (step & group.all())))
        with m.If(self.i_tile.ready):
            m.d.sync += [active.eq(self.i_tile.valid), pairs_left.eq(self.i_tile.valid & self.i_tile.payload)]

        m.d.comb += self.i_params.ready.eq(self.idle)
        with m.If(self.i_params.valid & self.idle):
            params = self.i_params.payload
            m.d.sync += [some.eq(params != 0), groups_left.eq((params + (self.lanes - 1)) >> self._lane_bits)]
            m.d.sync += [group.eq(0), pairs_left.eq(0), active.eq(0), full.eq(0)]
        return m

    def _window(self, m: Module, rows: Any, full: Signal, pairs_left: Signal, hits: Signal, step: Signal) -> None:
        """Rows enter as the second one and move up with the last pair of the first one."""
        done, both, moves = Signal(), Signal(), Signal()
        ends = [
            (mine & row.index.there & ~(row.index.there >> 1)).any()
            for mine, row in zip((hits[:ROW_PAIRS], hits[ROW_PAIRS:]), rows, strict=True)
        ]
        m.d.comb += [
            done.eq(step & ends[0]),
            both.eq(full[1] & rows[1].index.last & ends[1]),
            moves.eq(done | ~full[0]),
            self.i.ready.eq(moves | ~full[1]),
        ]
        with m.If(done & (rows[0].index.last | both)):
            m.d.sync += pairs_left.eq(0)
        with m.If(moves):
            m.d.sync += [rows[0].eq(rows[1]), full[0].eq(full[1] & ~(done & both)), full[1].eq(0)]
        with m.If(self.i.ready):
            m.d.sync += [rows[1].eq(self.i.payload), full[1].eq(self.i.valid)]

    def _lanes(self, m: Module, rows: Any, hits: Signal, ready: Signal) -> None:
        """Each value in the lane that the low bits of its index name."""
        indices, values = Cat(rows[0].index.index, rows[1].index.index), Cat(rows[0].value, rows[1].value)
        for lane in range(self.lanes):
            mine = [
                hits[k] & (indices.word_select(k, TILE_BITS)[: self._lane_bits] == lane)
                for k in range(ROW_PAIRS + lane)
            ]
            chosen = [Mux(wire(m, hit), values.word_select(k, FP32.bits), 0) for k, hit in enumerate(mine)]
            with m.If(ready):
                m.d.sync += self.o.payload.data.word_select(lane, FP32.bits).eq(reduce(or_, chosen))
