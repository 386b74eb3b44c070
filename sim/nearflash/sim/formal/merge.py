"""Bench of the pair merge, for groups of four."""

from typing import Any

from amaranth.hdl import Array, Cat, Mux, Signal

from nearflash.abi.topk import TILE_BITS
from nearflash.gateware.expand.pairs import PairMerge, PairRow
from nearflash.sim.formal.bench import Bench
from nearflash.sim.formal.properties import accept, check_source, moves, offer

__all__ = ["merge"]

_LANES = 4
_GROUP_BITS = TILE_BITS - 2


class _Groups:
    """Groups of the command, and the tile that is being merged."""

    def __init__(self, bench: Bench, dut: Any, failed: Any) -> None:
        m = bench.m
        self.begins = moves(dut.i_params)
        self.fresh = dut.o.valid & ~bench.past(dut.o.valid & ~dut.o.ready, "waited")  # made in the cycle before
        self.left, self.number = Signal(32), Signal(_GROUP_BITS)  # of the next fresh one in its tile
        self.tile, self.pairs = Signal(), Signal()  # one is being merged; with pairs
        self.order = Signal(3)  # tiles with pairs that have begun, modulo 8
        m.d.sync += [self.left.eq(self.left - self.fresh), self.number.eq(self.number + self.fresh)]
        with m.If(dut.i_tile.ready):
            begins = dut.i_tile.valid & dut.i_tile.payload
            m.d.sync += [self.tile.eq(dut.i_tile.valid), self.pairs.eq(begins), self.order.eq(self.order + begins)]
        with m.If(self.begins):
            m.d.sync += self.left.eq((dut.i_params.payload + (_LANES - 1)) >> 2)
            m.d.sync += [signal.eq(0) for signal in (self.number, self.tile, self.pairs, self.order)]
        self.idle = (self.left == 0) & ~dut.o.valid
        self.had_tile = bench.past(self.tile, "had_tile")
        self.had_pairs = bench.past(self.pairs, "had_pairs")
        self.had_order = bench.past(self.order, "had_order")
        self.had_failed = bench.past(failed, "had_failed")
        self.next = (self.number + self.fresh)[:_GROUP_BITS]


class _Rows:
    """Rows of sorted pairs, four but for a tile's last row; one pair of a command at most is marked, with ones."""

    def __init__(self, bench: Bench, dut: Any, groups: _Groups) -> None:
        m = bench.m
        row, marks = dut.i.payload.index, bench.free(4, "i_marks")
        m.d.comb += [
            dut.i.valid.eq(bench.free(1, "i_valid")),
            row.index.eq(bench.free(48, "i_index")),
            row.there.eq(bench.free(4, "i_there")),
            row.last.eq(bench.free(1, "i_last")),
            dut.i.payload.value.eq(Cat(mark.replicate(32) for mark in marks)),
        ]
        held = Cat(row.index, row.there, row.last, marks)
        waits = bench.past(dut.i.valid & ~dut.i.ready & ~groups.begins, "i_waits")
        bench.assume(~waits | (dut.i.valid & (held == bench.past(held, "i_past"))))
        self.taken = moves(dut.i) & ~groups.idle
        self.order, self.open, self.top = Signal(3), Signal(), Signal(TILE_BITS)  # of the newest row
        self.marked, self.tracked, self.younger = Signal(), Signal(), Signal(2)
        self.mark_index, self.mark_order, self.mark_lane = Signal(TILE_BITS), Signal(3), Signal(2)
        bench.assume(~dut.i.valid | groups.idle | self.sorted(row))
        bench.assume(~dut.i.valid | groups.idle | ~self.open | (row.index[:TILE_BITS] > self.top))
        bench.assume(((marks & (marks - 1)) == 0) & ((marks & ~row.there) == 0) & ((marks == 0) | ~self.marked))

        lane = Cat(marks[1] | marks[3], marks[2] | marks[3])
        self.enters = self.taken & (marks != 0)
        self.entering = self.index(row, lane)
        self.match = (
            self.tracked
            & groups.had_pairs
            & ~groups.had_failed
            & ((self.mark_order + 1)[:3] == groups.had_order)
            & (self.mark_index[2:] == groups.number)
        )
        with m.If(self.taken):
            m.d.sync += [
                self.order.eq(self.order + row.last),
                self.open.eq(~row.last),
                self.top.eq(self.last_index(row)),
            ]
            m.d.sync += self.younger.eq(self.younger + ~self.younger.all())
        with m.If(groups.fresh & self.match):
            m.d.sync += self.tracked.eq(0)
        with m.If(self.enters):
            m.d.sync += [self.marked.eq(1), self.tracked.eq(1), self.younger.eq(0), self.mark_lane.eq(lane)]
            m.d.sync += [self.mark_index.eq(self.entering), self.mark_order.eq(self.order)]
        with m.If(groups.begins):
            m.d.sync += [signal.eq(0) for signal in (self.order, self.open, self.marked, self.tracked)]

    @staticmethod
    def index(row: Any, lane: Any) -> Any:
        return Array(row.index.word_select(k, TILE_BITS) for k in range(4))[lane]

    def last_index(self, row: Any) -> Any:
        return self.index(row, sum(row.there) - 1)

    @staticmethod
    def sorted(row: Any) -> Any:
        lanes = [row.index.word_select(k, TILE_BITS) for k in range(4)]
        ascends = Cat(~row.there[k + 1] | (lanes[k] < lanes[k + 1]) for k in range(3)).all()
        return ascends & ((row.there & (row.there + 1)) == 0) & row.there[0] & (row.last | row.there[3])


def merge(dut: Any = None) -> Bench:
    """As many groups as the parameters want, 1024 a tile; each pair of a tile shows in its group and nowhere else."""
    dut = PairMerge(_LANES) if dut is None else dut
    bench = Bench(dut)
    offer(bench, dut.i_params, "i_params")
    offer(bench, dut.i_tile, "i_tile")
    accept(bench, dut.o)
    check_source(bench, dut.o)
    failed = bench.free(1, "failed")
    bench.m.d.comb += dut.failed.eq(failed)
    groups = _Groups(bench, dut, failed)
    bench.assume(failed | ~bench.past(failed & ~groups.begins, "failed_before"))
    rows = _Rows(bench, dut, groups)

    fresh, last = groups.fresh, dut.o.payload.last
    expected = Cat((rows.match & (rows.mark_index[:2] == lane)).replicate(32) for lane in range(_LANES))
    bench.prove("as_many_groups", ~fresh | (groups.left != 0))
    bench.prove("last_group", ~fresh | (last == (groups.left == 1)))
    bench.prove("no_group_without_a_tile", ~fresh | groups.had_tile | groups.had_failed)
    bench.prove("values_at_their_places", ~fresh | (dut.o.payload.data == expected))
    bench.prove("a_tile_when_the_one_before_is_done", ~(moves(dut.i_tile) & groups.tile) | groups.next.all())
    bench.prove("next_command_when_idle", (dut.i_params.ready == groups.idle) & (dut.idle == groups.idle))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    ahead = (rows.order - groups.order)[:3]  # tiles with pairs between the row's and the next one to begin
    in_time = (ahead == 7) & groups.pairs & (groups.next <= rows.entering[2:])
    bench.prove("no_pair_behind_its_group", ~rows.enters | failed | (ahead <= 2) | in_time)
    waits = Signal(range(4))
    bench.m.d.sync += waits.eq(
        Mux((groups.left != 0) & (failed | (groups.tile & ~groups.pairs)) & ~dut.o.valid, waits + ~waits.all(), 0)
    )
    bench.prove("groups_without_pairs_do_not_wait", waits < 2)
    bench.no_paths += [(dut.i.valid, dut.o.valid), (dut.i_tile.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    shows = moves(dut.o) & fresh & rows.match
    bench.cover("last_of_a_failure", moves(dut.o) & last & groups.had_failed & (groups.number == 2))
    bench.cover("a_pair_of_the_second_row", shows & (rows.mark_index == 7) & (rows.order == 2))
    _invariants(bench, dut, groups, rows, failed)
    return bench


def _invariants(bench: Bench, dut: Any, groups: _Groups, rows: _Rows, failed: Any) -> None:
    """What the registers inside hold, by what was seen outside."""
    m = bench.m
    groups_left, group = bench.probe("groups_left", 32), bench.probe("group", _GROUP_BITS)
    pairs_left, full = bench.probe("pairs_left", 1), bench.probe("full", 2)
    window = [Signal(PairRow, name=f"window_{k}") for k in range(2)]
    m.d.comb += Cat(window).eq(bench.probe("rows", 2 * len(window[0].as_value())))
    first, second = window[0].index, window[1].index
    runs = ~groups.idle & ~failed

    def inner(name: str, condition: Any) -> None:
        bench.prove(f"inner_{name}", ~runs | condition)

    some = bench.probe("some", 1)
    bench.prove("inner_some", some == (groups.left - groups.fresh != 0))
    bench.prove("inner_groups_left", ~some | (groups_left == groups.left - groups.fresh))
    bench.prove("inner_group", groups.idle | (group == groups.next))
    bench.prove("inner_tile", bench.probe("active", 1) == groups.tile)
    bench.prove("inner_pairs", (groups.pairs | ~pairs_left) & (groups.tile | ~groups.pairs))

    # Rows: sorted in the window, the first one of the tile that has pairs left.
    lasts = (full[0] & first.last) + (full[1] & second.last)
    begun = (groups.order - pairs_left)[:3]
    inner("orders", (rows.order - lasts)[:3] == begun)
    inner("sorted_0", ~full[0] | rows.sorted(first))
    inner("sorted_1", ~full[1] | rows.sorted(second))
    inner("sorted", ~full.all() | first.last | (second.index[:TILE_BITS] > rows.last_index(first)))
    newest = Mux(full[1], Cat(rows.last_index(second), ~second.last), Cat(rows.last_index(first), ~first.last))
    inner("newest", ~full.any() | (rows.open == newest[-1]) & (~rows.open | (rows.top == newest[:-1])))
    inner("nothing_open", full.any() | ~rows.open)
    inner("not_behind", ~(pairs_left & full[0]) | (rows.last_index(first)[2:] >= group))
    inner("no_tile", groups.tile | (group == 0))
    inner("first_group", ~pairs_left | full[0] | (group == 0))

    # The marked pair: where it is, and that it was shown with its group and not before.
    here = [rows.marked & full[0] & (rows.younger == full[1]), rows.marked & full[1] & (rows.younger == 0)]
    waiting = rows.tracked & ~(groups.fresh & rows.match)
    current = pairs_left & (rows.mark_order == begun)
    for k, row in enumerate(window):
        value = Cat((here[k] & (rows.mark_lane == lane)).replicate(32) for lane in range(4))
        inner(f"value_{k}", ~full[k] | (row.value == value))
        there = Array(row.index.there)[rows.mark_lane]
        inner(f"mark_{k}", ~here[k] | (there & (rows.index(row.index, rows.mark_lane) == rows.mark_index)))
        order = rows.order - (lasts if k == 0 else second.last)
        inner(f"mark_order_{k}", ~here[k] | (rows.mark_order == order[:3]))
        inner(f"waiting_{k}", ~(here[k] & waiting & current) | (rows.mark_index[2:] >= group))
        inner(f"shown_{k}", ~here[k] | waiting | (current & (rows.mark_index[2:] < group)))
    inner("inside", ~waiting | here[0] | here[1])
    inner("marked", rows.marked | ~rows.tracked)
