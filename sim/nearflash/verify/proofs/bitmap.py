"""Bench of the bitmap expander, for beats of four elements of 8 bits."""

from typing import Any

from amaranth.hdl import Array, Cat, Mux, Signal
from amaranth.lib import stream

from nearflash.gateware.weights.bitmap import BitmapExpander
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["bitmap"]

_WIDTH, _BITS = 4, 8


class _Reference:
    """The beats and the words of values inside, and where the marked value is among them."""

    def __init__(self, bench: Bench, dut: Any, values: Any) -> None:
        m = bench.m
        enters, leaves, word, marks = moves(dut.i_bitmap), moves(dut.o), moves(values), values.payload
        self.beats, self.inside = Array(Signal(_WIDTH + 1, name=f"beat_{n}") for n in range(4)), Signal(range(5))
        self.words, self.place = Signal(range(8)), Signal(range(_WIDTH))  # of the oldest beat's first value
        bits, self.last = self.beats[0][:_WIDTH], self.beats[0][_WIDTH]
        places = [self.place + sum(bits[:k]) for k in range(_WIDTH + 1)]
        self.end, self.needed, used = Signal(range(2 * _WIDTH)), Signal(2), Signal(2)  # of its values; words
        m.d.comb += [
            self.end.eq(places[-1]),
            self.needed.eq((self.end + _WIDTH - 1) // _WIDTH),
            used.eq(Mux(leaves, Mux(self.last, self.needed, self.end // _WIDTH), 0)),
        ]
        m.d.sync += [self.inside.eq(self.inside + enters - leaves), self.words.eq(self.words + word - used)]
        with m.If(leaves):
            m.d.sync += [self.beats[n].eq(self.beats[n + 1]) for n in range(3)]
            m.d.sync += self.place.eq(Mux(self.last, 0, self.end))
        with m.If(enters):
            m.d.sync += self.beats[self.inside - leaves].eq(dut.i_bitmap.payload)

        self.marked, self.tracked, self.at = Signal(), Signal(), Signal(range(8 * _WIDTH))
        mark = word & (marks != 0)
        m.d.sync += self.marked.eq(self.marked | mark)
        with m.If(mark):
            lane = Cat(marks[1] | marks[3], marks[2] | marks[3])
            m.d.sync += [self.tracked.eq(1), self.at.eq(Cat(lane, (self.words - used)[:3]))]
        with m.Elif(self.tracked):
            m.d.sync += [self.tracked.eq(self.at >= used * _WIDTH), self.at.eq(self.at - used * _WIDTH)]
        due = zip(bits, places[:-1], strict=True)
        self.expected = Cat((bit & self.marks(place)).replicate(_BITS) for bit, place in due)

    def marks(self, place: Any) -> Any:
        """Whether the marked value is at `place`, counted from the first one of the oldest word."""
        return self.tracked & (self.at == place)


def bitmap(dut: Any = None) -> Bench:
    """Each beat of the bitmap gives one, its ones the next values of its row.

    One value at most is marked, with all its bits; it comes out where it belongs, and only there (see properties.py).
    """
    dut = BitmapExpander(_WIDTH, _BITS) if dut is None else dut
    bench = Bench(dut)
    values = stream.Signature(_WIDTH).create()  # marks of a word
    offer(bench, dut.i_bitmap, "i_bitmap")
    offer(bench, values, "i_value")
    accept(bench, dut.o)
    check_source(bench, dut.o)
    bench.m.d.comb += [
        dut.i_value.valid.eq(values.valid),
        dut.i_value.payload.eq(Cat(mark.replicate(_BITS) for mark in values.payload)),
        values.ready.eq(dut.i_value.ready),
    ]
    ref = _Reference(bench, dut, values)
    bench.assume(~values.valid | ((values.payload & (values.payload - 1)) == 0))
    bench.assume(~(values.valid & (values.payload != 0) & ref.marked))

    some, complete = ref.inside != 0, ref.words >= ref.needed
    bench.prove("a_beat_for_a_beat", ~dut.o.valid | some)
    bench.prove("three_beats_inside", ref.inside <= 3)
    bench.prove("five_words_inside", ref.words <= 5)
    bench.prove("values_came_before", ~dut.o.valid | complete)
    bench.prove("values_at_their_places", ~dut.o.valid | (dut.o.payload.data == ref.expected))
    bench.prove("same_last", ~dut.o.valid | (dut.o.payload.last == ref.last))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    waits, starves = Signal(range(8)), Signal(range(8))  # cycles
    bench.m.d.sync += [
        waits.eq(Mux(some & complete & ~dut.o.valid, waits + ~waits.all(), 0)),
        starves.eq(Mux(some & ~complete & ~values.ready, starves + ~starves.all(), 0)),
    ]
    bench.prove("a_beat_with_its_values_comes_out", waits < dut.VALUE_LATENCY)
    bench.prove("takes_values_that_are_wanted", starves < 2)
    bench.prove("takes_a_beat_when_empty", some | dut.i_bitmap.ready)
    bench.no_paths += [(dut.i_bitmap.valid, dut.o.valid), (dut.i_value.valid, dut.o.valid)]
    ends = moves(dut.o) & ref.last
    bench.cover("a_row_ends_in_the_second_word", ends & (ref.end > _WIDTH))
    bench.cover("the_last_of_two_words", moves(dut.o) & ref.marks(ref.end - 1) & (ref.end == 2 * _WIDTH - 1))
    bench.cover("what_is_left_of_a_word_is_dropped", ends & ref.marks(ref.end) & (ref.end[:2] != 0))
    bench.cover("full", ref.inside == 3)
    _invariants(bench, dut, ref)
    return bench


def _invariants(bench: Bench, dut: Any, ref: _Reference) -> None:
    """What the registers inside hold, by what was seen outside."""
    valid, full = ([bench.probe(f"{name}_{k}", 1) for k in range(2)] for name in ("valid", "full"))
    place, packed = bench.probe("place", 2), bench.probe("packed", _WIDTH * _BITS)
    first = Mux(dut.o.valid, Mux(ref.last, ref.needed * _WIDTH, ref.end), ref.place)  # stage 1's values begin here
    first_beat, second_beat = ref.beats[dut.o.valid], ref.beats[dut.o.valid + valid[1]]
    first_end = first + sum(first_beat[:_WIDTH])
    second = Mux(valid[1], Mux(first_beat[_WIDTH], (first_end + _WIDTH - 1) & -_WIDTH, first_end), first)[:5]

    bench.prove("inner_inside", ref.inside == dut.o.valid + valid[0] + valid[1])
    bench.prove("inner_place", (place == second[:2]) & ((place == 0) | full[0]))
    bench.prove("inner_words", ref.words == (second >> 2) + full[0] + full[1])
    bench.prove("inner_mark", ~ref.tracked | (ref.marked & (ref.at >> 2 < ref.words)))
    bench.prove("inner_came", ~valid[1] | (ref.words * _WIDTH >= first_end))
    for k, index in enumerate((second >> 2, (second >> 2) + full[0])):
        word = Cat(ref.marks(index * _WIDTH + lane).replicate(_BITS) for lane in range(_WIDTH))
        bench.prove(f"inner_word_{k}", ~full[k] | (bench.probe(f"word_{k}", _WIDTH * _BITS) == word))
    for k, beat in enumerate((second_beat, first_beat)):
        same = Cat(bench.probe(f"bits_{k}", _WIDTH), bench.probe(f"last_{k}", 1)) == beat
        bench.prove(f"inner_beat_{k}", ~valid[k] | same)
    for k, size in enumerate((1, 2, 3, 3, 3)):
        count = bench.probe(f"ones_{k}", size)
        bench.prove(f"inner_ones_{k}", ~valid[0] | (count == sum(second_beat[:k])))
    for k in range(_WIDTH):
        distance = bench.probe(f"shift_1_{k}", 2)
        bench.prove(f"inner_shift_{k}", ~valid[1] | (distance == k - sum(first_beat[:k])))
        beyond = sum(first_beat[:_WIDTH]) <= k
        same = packed.word_select(k, _BITS) == ref.marks(first + k).replicate(_BITS)
        bench.prove(f"inner_packed_{k}", ~valid[1] | beyond | same)
