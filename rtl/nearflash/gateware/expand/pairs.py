"""Pair merge: rows of sorted pairs to groups of dense values, W parameters a cycle.

    i ─► window of two rows ─► pairs of this group ─► lanes ─► o
    i_tile ─► pairs left ───────────┘

Pairs are sorted and a row holds four, so that the pairs of a group of W ≤ 4 parameters are among the next W ones, and
these among two rows: every group takes one cycle, however many pairs it has.

Contract: a command of n parameters gives ceil(n / W) groups, the last one with `last`; parameters without a pair are
zero. Each tile has rows of its own. With `failed` the rest of the groups hold zeros, and no pairs are looked at. What
is inside from the command before is dropped when a command is taken.

Timing: latency LATENCY cycles from a tile on `i_tile`, its rows being there; one group a cycle; back-pressure: yes.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.topk import TILE_BITS
from nearflash.gateware.expand.indices import COUNT_BITS
from nearflash.gateware.expand.values import ROW_PAIRS

__all__ = ["PairMerge", "PairRow"]


class PairRow(data.Struct):
    """Four pairs."""

    index: ROW_PAIRS * TILE_BITS
    value: ROW_PAIRS * FP32.bits


class PairMerge(wiring.Component):
    """Merges pairs into groups of `lanes` parameters.

    Parameters
    ----------
    lanes : parameters a cycle, 1, 2 or 4.

    Members
    -------
    i_params : In stream of the number of parameters; taken when the groups of the one before were.
    i_tile : In stream of the number of pairs in a tile.
    i : In stream of PairRow.
    failed : In, stands to the end of the command.
    o : Out stream of struct {data: lanes · 32 bits, last: 1}.
    idle : Out, all groups were taken.

    Raises
    ------
    ValueError : another number of lanes.
    """

    #: Cycles from a tile on `i_tile` to its first group.
    LATENCY = 3

    def __init__(self, lanes: int) -> None:
        if lanes not in (1, 2, 4):
            raise ValueError(f"lanes must be 1, 2 or 4, not {lanes!r}")
        self.lanes = lanes
        self._lane_bits = lanes.bit_length() - 1
        super().__init__(
            {
                "i_params": In(stream.Signature(32)),
                "i_tile": In(stream.Signature(COUNT_BITS)),
                "i": In(stream.Signature(PairRow)),
                "failed": In(1),
                "o": Out(stream.Signature(data.StructLayout({"data": FP32.bits * lanes, "last": 1}))),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One register stage behind the window, one behind the lanes."""
        m = Module()
        rows = Signal(data.ArrayLayout(PairRow, 2))
        full, place = Signal(2), Signal(range(ROW_PAIRS))  # rows that are there; of the next pair in the first one
        left = Signal(COUNT_BITS)  # pairs of the tile
        groups_left, group = Signal(32), Signal(TILE_BITS - self._lane_bits)
        some, active = Signal(), Signal()  # groups are left; a tile is being merged
        step, drop, ready = Signal(), Signal(), Signal()

        # Cycle 0: the next pairs, and how many of them lie in this group.
        count = range(self.lanes)
        there = Signal(self.lanes)
        hits = Signal(self.lanes)
        found = Signal(range(self.lanes + 1))
        indices = [self._pair(m, rows, place, k, "index", TILE_BITS) for k in count]
        values = [self._pair(m, rows, place, k, "value", FP32.bits) for k in count]
        beyond = Cat(place + k >= ROW_PAIRS for k in count)  # which of them are in the second row
        lacks = ((there & beyond).any() & ~full[1]) | (there.any() & ~full[0])
        m.d.comb += [
            there.eq(Cat(left > k for k in count)),
            hits.eq(there & Cat(index[self._lane_bits :] == group for index in indices)),
            found.eq(sum(hits[k] for k in count)),
            step.eq(some & ready & (self.failed | (active & ~lacks))),
            drop.eq(step & ~self.failed & (found != 0) & ((place + found >= ROW_PAIRS) | (left == found))),
        ]
        with m.If(step):
            m.d.sync += [
                left.eq(left - found),
                place.eq(Mux(drop & (left == found), 0, place + found)),
                group.eq(group + 1),
                groups_left.eq(groups_left - 1),
                some.eq(groups_left != 1),
            ]
        self._window(m, rows, full, drop)

        # A tile begins when none is there, or with the last group of the one before.
        ends = step & (group.all() | (groups_left == 1))
        m.d.comb += self.i_tile.ready.eq(some & (~active | (step & group.all())))
        with m.If(ends):
            m.d.sync += active.eq(0)
        with m.If(self.i_tile.ready & self.i_tile.valid):
            m.d.sync += [active.eq(groups_left != Mux(active, 1, 0)), left.eq(self.i_tile.payload)]

        # Cycle 1: the pairs of a group. Cycle 2: each in its lane.
        ...
        return m
