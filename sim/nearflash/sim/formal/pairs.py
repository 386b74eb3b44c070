"""Benches of what the pairs of Top-K streams go through behind their checks: widening of values, and the merge."""

from typing import Any

from amaranth.hdl import Cat, Const, Mux, Signal

from nearflash.abi.topk import TILE_BITS, ValueFormat
from nearflash.gateware.expand.pairs import PairMerge
from nearflash.gateware.expand.values import ValueRows
from nearflash.sim.formal.bench import Bench
from nearflash.sim.formal.properties import accept, check_source, moves, offer

__all__ = ["merge", "values"]


def values(dut: Any = None) -> Bench:
    """A row for every four values of a section; of fp16 only normal numbers are looked at."""
    dut = ValueRows() if dut is None else dut
    bench = Bench(dut)
    m = bench.m
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    form = bench.free(2, "value_format")
    half, some, row, full = Signal(64), Signal(), Signal(128), Signal()  # half a row; a row
    known = Signal(4)  # which values of it
    m.d.comb += dut.value_format.eq(form)
    bench.assume(form < len(ValueFormat))
    bench.assume(~some | (form == bench.past(form, "form_past")))

    word, data, last = moves(dut.i), dut.i.payload.data, dut.i.payload.last
    wide = form == ValueFormat.FP32
    lanes, exact = [], []
    for k in range(4):
        bits = data.word_select(k, 16)
        fp16 = Cat(Const(0, 13), bits[:10], (bits[10:15] + 112)[:8], bits[15])
        lanes.append(Mux(form == ValueFormat.BF16, Cat(Const(0, 16), bits), fp16))
        exact.append((form == ValueFormat.BF16) | ((bits[10:15] != 0) & (bits[10:15] != 31)))
    ends = word & (~wide | some | last)
    m.d.sync += [full.eq(ends | (full & ~dut.o.ready)), some.eq(Mux(word, wide & ~some & ~last, some))]
    with m.If(word & wide & ~some):
        m.d.sync += half.eq(data)
    with m.If(ends):
        m.d.sync += row.eq(Mux(wide, Mux(some, Cat(half, data), data), Cat(lanes)))
        m.d.sync += known.eq(Mux(wide, Mux(some, 15, 3), Cat(exact)))
    bench.prove("a_row_for_four_values", dut.o.valid == full)
    for k in range(4):
        here = [value.word_select(k, 32) for value in (dut.o.payload, row)]
        bench.prove(f"same_value_{k}", ~(dut.o.valid & known[k]) | (here[0] == here[1]))
    bench.prove("takes_a_word_when_there_is_room", dut.i.ready == (dut.o.ready | ~full))
    bench.prove("inner_second", bench.probe("second", 1) == some)
    bench.prove("inner_half", ~some | (dut.o.payload[:64] == half))
    bench.no_paths += [(dut.i.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    bench.cover("a_row_of_two_words", moves(dut.o) & wide & (known == 15) & (row[64:] != 0))
    bench.cover("half_a_row", moves(dut.o) & (known == 3) & (row[:64] != 0))
    return bench


def merge(dut: Any = None) -> Bench:
    """Groups of four: as many as the parameters say, a thousand and 24 a tile, zeros where there are no pairs."""
    dut = PairMerge(4) if dut is None else dut
    bench = Bench(dut)
    m = bench.m
    offer(bench, dut.i_params, "i_params")
    offer(bench, dut.i_tile, "i_tile")
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    begins, failed = moves(dut.i_params), bench.free(1, "failed")
    m.d.comb += dut.failed.eq(failed)
    bench.assume(failed | ~bench.past(failed & ~begins, "failed_before"))

    fresh = dut.o.valid & ~bench.past(dut.o.valid & ~dut.o.ready, "waited")  # a group that was made the cycle before
    left, number = Signal(32), Signal(TILE_BITS - 2)  # groups; of the tile's next one
    tile, pairs = Signal(), Signal()  # one is being merged; with pairs
    m.d.sync += [left.eq(left - fresh), number.eq(number + fresh)]
    with m.If(dut.i_tile.ready):
        m.d.sync += [tile.eq(dut.i_tile.valid), pairs.eq(dut.i_tile.valid & dut.i_tile.payload)]
    with m.If(begins):
        m.d.sync += [left.eq((dut.i_params.payload + 3) >> 2), number.eq(0), tile.eq(0), pairs.eq(0)]
    had_tile, had_pairs, had_failed = (
        bench.past(value, name) for value, name in ((tile, "had_tile"), (pairs, "had_pairs"), (failed, "had_failed"))
    )
    idle = (left == 0) & ~dut.o.valid
    bench.prove("as_many_groups", ~fresh | (left != 0))
    bench.prove("last_group", ~fresh | (dut.o.payload.last == (left == 1)))
    bench.prove("no_group_without_a_tile", ~fresh | had_tile | had_failed)
    bench.prove("zeros_without_pairs", ~fresh | had_pairs | (dut.o.payload.data == 0))
    bench.prove("zeros_where_it_failed", ~(fresh & had_failed) | (dut.o.payload.data == 0))
    bench.prove("a_tile_when_the_one_before_is_done", ~(moves(dut.i_tile) & tile) | ((number + fresh)[:10] == 1023))
    bench.prove("next_command_when_idle", (dut.i_params.ready == idle) & (dut.idle == idle))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    waits, free = Signal(range(4)), failed | (tile & ~pairs)  # of pairs
    m.d.sync += waits.eq(Mux((left != 0) & free & ~dut.o.valid, waits + ~waits.all(), 0))
    bench.prove("groups_without_pairs_do_not_wait", waits < 2)
    bench.no_paths += [(dut.i.valid, dut.o.valid), (dut.i_tile.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    bench.cover("last_of_a_failure", moves(dut.o) & dut.o.payload.last & had_failed & (number == 2))
    bench.cover(
        "a_group_of_four_pairs", moves(dut.o) & Cat(dut.o.payload.data.word_select(k, 32).any() for k in range(4)).all()
    )

    groups_left, group = bench.probe("groups_left", 32), bench.probe("group", TILE_BITS - 2)
    bench.prove("inner_left", groups_left == left - fresh)
    bench.prove("inner_some", bench.probe("some", 1) == (groups_left != 0))
    bench.prove("inner_group", group == (number + fresh)[: TILE_BITS - 2])
    bench.prove("inner_tile", bench.probe("active", 1) == tile)
    bench.prove("inner_pairs", pairs | ~bench.probe("pairs_left", 1))
    return bench
