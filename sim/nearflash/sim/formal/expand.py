"""Benches of the expanders' parts."""

from typing import Any

from amaranth.hdl import Array, Cat, Mux, Signal
from amaranth.lib import stream

from nearflash.gateware.expand.bitmap import BitmapExpander
from nearflash.sim.formal.bench import Bench
from nearflash.sim.formal.properties import accept, check_source, moves, offer

__all__ = ["bitmap"]

_WIDTH = 4


def bitmap(dut: Any = None) -> Bench:
    """Beats of four elements: each beat of the bitmap gives one, its ones the next values of its row.

    One value at most is marked, with all its bits; it comes out where it belongs, and only there (see properties.py).
    """
    dut = BitmapExpander(_WIDTH, 8) if dut is None else dut
    bench = Bench(dut)
    m = bench.m
    values = stream.Signature(_WIDTH).create()  # marks of a word
    offer(bench, dut.i_bitmap, "i_bitmap")
    offer(bench, values, "i_value")
    accept(bench, dut.o)
    check_source(bench, dut.o)
    m.d.comb += [
        dut.i_value.valid.eq(values.valid),
        dut.i_value.payload.eq(Cat(mark.replicate(dut.element_bits) for mark in values.payload)),
        values.ready.eq(dut.i_value.ready),
    ]
    enters, leaves, word = moves(dut.i_bitmap), moves(dut.o), moves(values)

    # The beats inside, and of the oldest one: where its values are among the words inside.
    beats, inside = Array(Signal(_WIDTH + 1, name=f"beat_{n}") for n in range(4)), Signal(range(5))
    bits, last = beats[0][:_WIDTH], beats[0][_WIDTH]
    words, place = Signal(range(8)), Signal(range(_WIDTH))
    places = [place + sum(bits[:k]) for k in range(_WIDTH + 1)]
    end, used, needed = Signal(range(2 * _WIDTH)), Signal(2), Signal(2)
    m.d.comb += [
        end.eq(places[-1]),
        needed.eq((end + _WIDTH - 1) // _WIDTH),
        used.eq(Mux(leaves, Mux(last, needed, end // _WIDTH), 0)),
    ]
    m.d.sync += [inside.eq(inside + enters - leaves), words.eq(words + word - used)]
    with m.If(leaves):
        m.d.sync += [beats[n].eq(beats[n + 1]) for n in range(3)]
        m.d.sync += place.eq(Mux(last, 0, end))
    with m.If(enters):
        m.d.sync += beats[inside - leaves].eq(dut.i_bitmap.payload)

    marked, tracked, at = Signal(), Signal(), Signal(range(8 * _WIDTH))  # the marked value, among those inside
    marks = values.payload
    lane = Cat(marks[1] | marks[3], marks[2] | marks[3])
    mark = word & (marks != 0)
    m.d.sync += marked.eq(marked | mark)
    with m.If(mark):
        m.d.sync += [tracked.eq(1), at.eq(Cat(lane, (words - used)[:3]))]
    with m.Elif(tracked):
        m.d.sync += [tracked.eq(at >= used * _WIDTH), at.eq(at - used * _WIDTH)]
    bench.assume(~values.valid | ((marks & (marks - 1)) == 0))
    bench.assume(~(values.valid & (marks != 0) & marked))

    expected = Cat(
        (bit & tracked & (at == where)).replicate(dut.element_bits)
        for bit, where in zip(bits, places[:-1], strict=True)
    )
    bench.prove("a_beat_for_a_beat", ~dut.o.valid | (inside != 0))
    bench.prove("three_beats_inside", inside <= 3)
    bench.prove("five_words_inside", words <= 5)
    bench.prove("values_came_before", ~dut.o.valid | (words >= needed))
    bench.prove("values_at_their_places", ~dut.o.valid | (dut.o.payload.data == expected))
    bench.prove("same_last", ~dut.o.valid | (dut.o.payload.last == last))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    waits, starves = Signal(range(8)), Signal(range(8))  # cycles
    complete = (inside != 0) & (words >= needed)
    m.d.sync += [
        waits.eq(Mux(complete & ~dut.o.valid, waits + ~waits.all(), 0)),
        starves.eq(Mux((inside != 0) & ~complete & ~values.ready, starves + ~starves.all(), 0)),
    ]
    bench.prove("a_beat_with_its_values_comes_out", waits < dut.VALUE_LATENCY)
    bench.prove("takes_values_that_are_wanted", starves < 2)
    bench.prove("takes_a_beat_when_empty", (inside != 0) | dut.i_bitmap.ready)

    # Invariants, so that it is inductive: what each register holds, by what was seen outside.
    valid, full = ([bench.probe(f"{name}_{k}", 1) for k in range(2)] for name in ("valid", "full"))
    before = bench.probe("place", 2)
    first = Mux(dut.o.valid, Mux(last, needed * _WIDTH, end), place)  # stage 1's values begin here
    first_beat, second_beat = beats[dut.o.valid], beats[dut.o.valid + valid[1]]
    first_end = first + sum(first_beat[:_WIDTH])
    second = Mux(valid[1], Mux(first_beat[_WIDTH], (first_end + _WIDTH - 1) & -_WIDTH, first_end), first)[:5]

    def marks_from(where: Any) -> Any:
        return Cat((tracked & (at == where + k)).replicate(dut.element_bits) for k in range(_WIDTH))

    bench.prove("inner_inside", inside == dut.o.valid + valid[0] + valid[1])
    bench.prove("inner_place", (before == second[:2]) & ((before == 0) | full[0]))
    bench.prove("inner_words", words == (second >> 2) + full[0] + full[1])
    bench.prove("inner_mark", ~tracked | (marked & (at >> 2 < words)))
    for k, index in enumerate((second >> 2, (second >> 2) + full[0])):
        bench.prove(f"inner_word_{k}", ~full[k] | (bench.probe(f"word_{k}", 32) == marks_from(index * _WIDTH)))
    for k, beat in enumerate((second_beat, first_beat)):
        same = Cat(bench.probe(f"bits_{k}", _WIDTH), bench.probe(f"last_{k}", 1)) == beat
        bench.prove(f"inner_beat_{k}", ~valid[k] | same)
    for k, size in enumerate((1, 2, 3, 3, 3)):
        count = bench.probe(f"ones_{k}", size)
        bench.prove(f"inner_ones_{k}", ~valid[0] | (count == sum(second_beat[:k])))
    packed = bench.probe("packed", 32)
    for k in range(_WIDTH):
        distance = bench.probe(f"shift_1_{k}", 2)
        bench.prove(f"inner_shift_{k}", ~valid[1] | (distance == k - sum(first_beat[:k])))
        some = ~valid[1] | (sum(first_beat[:_WIDTH]) <= k)
        same = packed.word_select(k, 8) == (tracked & (at == first + k)).replicate(8)
        bench.prove(f"inner_packed_{k}", some | same)
    bench.prove("inner_came", ~valid[1] | (words * _WIDTH >= first_end))
    bench.no_paths += [(dut.i_bitmap.valid, dut.o.valid), (dut.i_value.valid, dut.o.valid)]
    bench.cover("a_row_ends_in_the_second_word", leaves & last & (end > _WIDTH))
    bench.cover("the_last_of_two_words", leaves & tracked & (at == 2 * _WIDTH - 2) & (end == 2 * _WIDTH - 1))
    bench.cover("what_is_left_of_a_word_is_dropped", leaves & last & tracked & (at == end) & (end[:2] != 0))
    bench.cover("full", inside == 3)
    return bench
