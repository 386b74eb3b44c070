"""Pair merge: rows of sorted pairs to groups of dense values, W parameters a cycle.

    i ─► window of two rows ─► pairs of this group ─► lanes ─► o
    i_tile ─► pairs left ───────────┘

Pairs are sorted and a row holds four, so that the pairs of a group of W ≤ 4 parameters are among the next W ones, and
these among two rows: every group takes one cycle, however many pairs it has.

Contract: a command of n parameters gives ceil(n / W) groups, the last one with `last`; parameters without a pair are
zero. Each tile has rows of its own. With `failed` the rest of the groups hold zeros, and no pairs are looked at. What
is inside from the command before is dropped when a command is taken.

Timing: latency LATENCY cycles from a tile on `i_tile`, ROW_LATENCY from a row where that comes later; one group a
cycle, and one cycle more for a tile whose last pairs lie in two rows and one group; back-pressure: yes.
"""

from functools import reduce
from operator import or_
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
    #: Cycles from a row on `i` to its first group.
    ROW_LATENCY = 4

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
        rows, full = Signal(data.ArrayLayout(PairRow, 2)), Signal(2)
        place = Signal(range(ROW_PAIRS))  # of the next pair in the first row
        left = Signal(COUNT_BITS)  # pairs of the tile
        groups_left, group = Signal(32), Signal(TILE_BITS - self._lane_bits)
        some, active = Signal(), Signal()  # groups are left; a tile is being merged
        step, drop, drop_both, ready, final = Signal(), Signal(), Signal(), Signal(), Signal()

        # Cycle 0: the next pairs, and how many of them lie in this group.
        pairs = [self._pair(m, rows, place, k) for k in range(self.lanes)]
        there, hits, found = Signal(self.lanes), Signal(self.lanes), Signal(range(self.lanes + 1))
        second = Cat(place + k >= ROW_PAIRS for k in range(self.lanes))  # lies in the second row
        lacks = (there & ((second & ~full[1].replicate(self.lanes)) | ~full[0].replicate(self.lanes))).any()
        m.d.comb += [
            there.eq(Cat(left > k for k in range(self.lanes))),
            hits.eq(there & Cat(index[self._lane_bits :] == group for index, _ in pairs)),
            found.eq(sum(hits[k] for k in range(self.lanes))),
            step.eq(some & ready & (self.failed | (active & ~lacks))),
            drop.eq(step & (found != 0) & ((place + found >= ROW_PAIRS) | (left == found))),
            drop_both.eq(step & (place + found > ROW_PAIRS) & (left == found)),
            final.eq(groups_left == 1),
        ]
        with m.If(step):
            m.d.sync += [left.eq(left - found), place.eq(Mux(left == found, 0, place + found))]
            m.d.sync += [group.eq(group + 1), groups_left.eq(groups_left - 1), some.eq(~final)]
        self._window(m, rows, full, drop, drop_both)

        # A tile is taken when there is none, or with the last group of the one before.
        tile_ends = step & group.all()
        m.d.comb += self.i_tile.ready.eq(some & (~active | tile_ends))
        with m.If(self.i_tile.ready):
            m.d.sync += [active.eq(self.i_tile.valid), left.eq(self.i_tile.payload)]

        # Cycle 1: pairs of a group. Cycle 2: each in its lane.
        self._lanes(m, step, hits & ~self.failed.replicate(self.lanes), pairs, final, ready, some)

        m.d.comb += self.i_params.ready.eq(self.idle)
        with m.If(self.i_params.valid & self.idle):
            params = self.i_params.payload
            m.d.sync += [some.eq(params != 0), groups_left.eq((params + (self.lanes - 1)) >> self._lane_bits)]
            m.d.sync += [group.eq(0), place.eq(0), left.eq(0), active.eq(0), full.eq(0)]
        return m

    def _pair(self, m: Module, rows: Any, place: Value, k: int) -> tuple[Value, Value]:
        """Index and value of the k-th next pair."""
        index = Signal(TILE_BITS, name=f"index_{k}")
        value = Signal(FP32.bits, name=f"value_{k}")
        for name, signal in (("index", index), ("value", value)):
            both = Cat(rows[0][name], rows[1][name])[k * len(signal) :]
            m.d.comb += signal.eq(both.word_select(place, len(signal)))
        return index, value

    def _window(self, m: Module, rows: Any, full: Signal, drop: Signal, drop_both: Signal) -> None:
        """Rows enter as the second one and move up when there is no first one any more."""
        moves = Signal()
        m.d.comb += [moves.eq(drop | ~full[0]), self.i.ready.eq(moves | ~full[1])]
        with m.If(moves):
            m.d.sync += [rows[0].eq(rows[1]), full[0].eq(full[1] & ~drop_both), full[1].eq(0)]
        with m.If(self.i.ready):
            m.d.sync += [rows[1].eq(self.i.payload), full[1].eq(self.i.valid)]

    def _lanes(self, m: Module, step: Value, hits: Value, pairs: Any, last: Value, ready: Signal, some: Value) -> None:
        """Registers of the pairs, then those of the lanes, which drive `o`."""
        hit, is_last, valid, moves = Signal(self.lanes), Signal(), Signal(), Signal()
        at = [Signal(max(self._lane_bits, 1), name=f"at_{k}") for k in range(self.lanes)]
        value = [Signal(FP32.bits, name=f"at_value_{k}", reset_less=True) for k in range(self.lanes)]
        m.d.comb += [
            moves.eq(self.o.ready | ~self.o.valid),
            ready.eq(moves | ~valid),
            self.idle.eq(~(some | valid | self.o.valid)),
        ]
        with m.If(ready):
            m.d.sync += [valid.eq(step), hit.eq(hits), is_last.eq(last)]
            for k, (index, bits) in enumerate(pairs):
                m.d.sync += [at[k].eq(index[: self._lane_bits]), value[k].eq(bits)]
        with m.If(moves):
            m.d.sync += [self.o.valid.eq(valid), self.o.payload.last.eq(is_last)]
            for lane in range(self.lanes):
                chosen = [Mux(hit[k] & (at[k] == lane), value[k], 0) for k in range(self.lanes)]
                m.d.sync += self.o.payload.data.word_select(lane, FP32.bits).eq(reduce(or_, chosen))
