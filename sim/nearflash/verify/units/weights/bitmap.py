"""The bitmap expander: a proof for beats of four elements of 8 bits; vectors of rows of all lengths and densities.

What follows a row's values in the vectors' words is anything.
"""

from typing import Any

import numpy as np
from amaranth.hdl import Array, Cat, Mux, Signal
from amaranth.lib import stream
from numpy.typing import NDArray

from nearflash.gateware.weights.bitmap import BitmapExpander
from nearflash.model.weights.bitmap import expand_row
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "TARGET", "build_proof", "component", "vectors"]

_PROOF_WIDTH, _BITS = 4, 8


class _Reference:
    """The beats and the words of values inside, and where the marked value is among them."""

    def __init__(self, harness: ProofHarness, dut: Any, values: Any) -> None:
        m = harness.m
        enters, leaves, word, marks = moves(dut.i_bitmap), moves(dut.o), moves(values), values.payload
        self.beats, self.inside = Array(Signal(_PROOF_WIDTH + 1, name=f"beat_{n}") for n in range(4)), Signal(range(5))
        self.words, self.place = Signal(range(8)), Signal(range(_PROOF_WIDTH))  # of the oldest beat's first value
        bits, self.last = self.beats[0][:_PROOF_WIDTH], self.beats[0][_PROOF_WIDTH]
        places = [self.place + sum(bits[:k]) for k in range(_PROOF_WIDTH + 1)]
        self.end, self.needed, used = Signal(range(2 * _PROOF_WIDTH)), Signal(2), Signal(2)  # of its values; words
        m.d.comb += [
            self.end.eq(places[-1]),
            self.needed.eq((self.end + _PROOF_WIDTH - 1) // _PROOF_WIDTH),
            used.eq(Mux(leaves, Mux(self.last, self.needed, self.end // _PROOF_WIDTH), 0)),
        ]
        m.d.sync += [self.inside.eq(self.inside + enters - leaves), self.words.eq(self.words + word - used)]
        with m.If(leaves):
            m.d.sync += [self.beats[n].eq(self.beats[n + 1]) for n in range(3)]
            m.d.sync += self.place.eq(Mux(self.last, 0, self.end))
        with m.If(enters):
            m.d.sync += self.beats[self.inside - leaves].eq(dut.i_bitmap.payload)

        self.marked, self.tracked, self.at = Signal(), Signal(), Signal(range(8 * _PROOF_WIDTH))
        mark = word & (marks != 0)
        m.d.sync += self.marked.eq(self.marked | mark)
        with m.If(mark):
            lane = Cat(marks[1] | marks[3], marks[2] | marks[3])
            m.d.sync += [self.tracked.eq(1), self.at.eq(Cat(lane, (self.words - used)[:3]))]
        with m.Elif(self.tracked):
            m.d.sync += [self.tracked.eq(self.at >= used * _PROOF_WIDTH), self.at.eq(self.at - used * _PROOF_WIDTH)]
        due = zip(bits, places[:-1], strict=True)
        self.expected = Cat((bit & self.marks(place)).replicate(_BITS) for bit, place in due)

    def marks(self, place: Any) -> Any:
        """Whether the marked value is at `place`, counted from the first one of the oldest word."""
        return self.tracked & (self.at == place)


def build_proof(dut: Any = None) -> ProofHarness:
    """Each beat of the bitmap gives one, its ones the next values of its row.

    One value at most is marked, with all its bits; it comes out where it belongs, and only there (see properties.py).
    """
    dut = BitmapExpander(_PROOF_WIDTH, _BITS) if dut is None else dut
    harness = ProofHarness(dut)
    values = stream.Signature(_PROOF_WIDTH).create()  # marks of a word
    offer(harness, dut.i_bitmap, "i_bitmap")
    offer(harness, values, "i_value")
    accept(harness, dut.o)
    check_source(harness, dut.o)
    harness.m.d.comb += [
        dut.i_value.valid.eq(values.valid),
        dut.i_value.payload.eq(Cat(mark.replicate(_BITS) for mark in values.payload)),
        values.ready.eq(dut.i_value.ready),
    ]
    ref = _Reference(harness, dut, values)
    harness.assume(~values.valid | ((values.payload & (values.payload - 1)) == 0))
    harness.assume(~(values.valid & (values.payload != 0) & ref.marked))

    some, complete = ref.inside != 0, ref.words >= ref.needed
    harness.prove("a_beat_for_a_beat", ~dut.o.valid | some)
    harness.prove("three_beats_inside", ref.inside <= 3)
    harness.prove("five_words_inside", ref.words <= 5)
    harness.prove("values_came_before", ~dut.o.valid | complete)
    harness.prove("values_at_their_places", ~dut.o.valid | (dut.o.payload.data == ref.expected))
    harness.prove("same_last", ~dut.o.valid | (dut.o.payload.last == ref.last))
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    waits, starves = Signal(range(8)), Signal(range(8))  # cycles
    harness.m.d.sync += [
        waits.eq(Mux(some & complete & ~dut.o.valid, waits + ~waits.all(), 0)),
        starves.eq(Mux(some & ~complete & ~values.ready, starves + ~starves.all(), 0)),
    ]
    harness.prove("a_beat_with_its_values_comes_out", waits < dut.VALUE_LATENCY)
    harness.prove("takes_values_that_are_wanted", starves < 2)
    harness.prove("takes_a_beat_when_empty", some | dut.i_bitmap.ready)
    harness.no_paths += [(dut.i_bitmap.valid, dut.o.valid), (dut.i_value.valid, dut.o.valid)]
    ends = moves(dut.o) & ref.last
    harness.cover("a_row_ends_in_the_second_word", ends & (ref.end > _PROOF_WIDTH))
    harness.cover("the_last_of_two_words", moves(dut.o) & ref.marks(ref.end - 1) & (ref.end == 2 * _PROOF_WIDTH - 1))
    harness.cover("what_is_left_of_a_word_is_dropped", ends & ref.marks(ref.end) & (ref.end[:2] != 0))
    harness.cover("full", ref.inside == 3)
    _invariants(harness, dut, ref)
    return harness


def _invariants(harness: ProofHarness, dut: Any, ref: _Reference) -> None:
    """Assert what the registers inside hold, by what was seen outside."""
    valid, full = ([harness.probe(f"{name}_{k}", 1) for k in range(2)] for name in ("valid", "full"))
    place, packed = harness.probe("place", 2), harness.probe("packed", _PROOF_WIDTH * _BITS)
    first = Mux(
        dut.o.valid, Mux(ref.last, ref.needed * _PROOF_WIDTH, ref.end), ref.place
    )  # stage 1's values begin here
    first_beat, second_beat = ref.beats[dut.o.valid], ref.beats[dut.o.valid + valid[1]]
    first_end = first + sum(first_beat[:_PROOF_WIDTH])
    second = Mux(
        valid[1], Mux(first_beat[_PROOF_WIDTH], (first_end + _PROOF_WIDTH - 1) & -_PROOF_WIDTH, first_end), first
    )[:5]

    harness.prove("inner_inside", ref.inside == dut.o.valid + valid[0] + valid[1])
    harness.prove("inner_place", (place == second[:2]) & ((place == 0) | full[0]))
    harness.prove("inner_words", ref.words == (second >> 2) + full[0] + full[1])
    harness.prove("inner_mark", ~ref.tracked | (ref.marked & (ref.at >> 2 < ref.words)))
    harness.prove("inner_came", ~valid[1] | (ref.words * _PROOF_WIDTH >= first_end))
    for k, index in enumerate((second >> 2, (second >> 2) + full[0])):
        word = Cat(ref.marks(index * _PROOF_WIDTH + lane).replicate(_BITS) for lane in range(_PROOF_WIDTH))
        harness.prove(f"inner_word_{k}", ~full[k] | (harness.probe(f"word_{k}", _PROOF_WIDTH * _BITS) == word))
    for k, beat in enumerate((second_beat, first_beat)):
        same = Cat(harness.probe(f"bits_{k}", _PROOF_WIDTH), harness.probe(f"last_{k}", 1)) == beat
        harness.prove(f"inner_beat_{k}", ~valid[k] | same)
    for k, size in enumerate((1, 2, 3, 3, 3)):
        count = harness.probe(f"ones_{k}", size)
        harness.prove(f"inner_ones_{k}", ~valid[0] | (count == sum(second_beat[:k])))
    for k in range(_PROOF_WIDTH):
        distance = harness.probe(f"shift_1_{k}", 2)
        harness.prove(f"inner_shift_{k}", ~valid[1] | (distance == k - sum(first_beat[:k])))
        beyond = sum(first_beat[:_PROOF_WIDTH]) <= k
        same = packed.word_select(k, _BITS) == ref.marks(first + k).replicate(_BITS)
        harness.prove(f"inner_packed_{k}", ~valid[1] | beyond | same)


_WIDTH = 4
_ROWS = 120


def component() -> ObservedStreams:
    """The smallest one."""
    return ObservedStreams(BitmapExpander(_WIDTH, 8))


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Rows of one to nine beats, now and then of many; without ones, with some, or with all."""
    beats, words, expected = [], [], []
    for _ in range(_ROWS):
        count = int(rng.choice([1, 2, 3, 9, 40], p=[0.3, 0.3, 0.2, 0.18, 0.02]))
        present = rng.random((count, _WIDTH)) < rng.choice([0, 0.1, 0.5, 0.9, 1])
        if rng.integers(4) == 0:
            present[: rng.integers(count + 1)] = 0
        values = rng.integers(0, 256, -(-int(present.sum()) // _WIDTH) * _WIDTH, np.uint8)
        bitmap = np.packbits(present.reshape(-1), bitorder="little").tobytes()
        dense = expand_row(bitmap, values.tobytes(), present.size, np.uint8)
        last = np.arange(count) == count - 1
        beats.append(present @ (1 << np.arange(_WIDTH)) | last << _WIDTH)
        words.append(values.view("<u4"))
        expected.append(dense.view("<u4").astype(np.uint64) | last.astype(np.uint64) << np.uint64(8 * _WIDTH))
    inputs: dict[str, NDArray[Any]] = {"i_bitmap": np.concatenate(beats).astype(np.uint8)}
    return inputs | {"i_value": np.concatenate(words)}, {"o": np.concatenate(expected)}


PROOF = Proof(build_proof, engine="induction", depth=6)
TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=6, cut_cycles=(9, 20, 33))
