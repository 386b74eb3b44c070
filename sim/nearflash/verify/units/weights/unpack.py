"""The unpacker: a proof for groups of two fields of 4, 8 or 16 bits from words of 32 bits; vectors of many counts.

The vectors' counts are of no, of few and of many fields, in words that hold more than the count.
"""

from typing import Any

import numpy as np
from amaranth.hdl import Array, Cat, Mux, Signal
from numpy.typing import NDArray

from nearflash.gateware.weights.unpack import FieldUnpack
from nearflash.model.weights.fields import join_fields
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "TARGET", "build_proof", "component", "vectors"]

_PROOF_WIDTH, _PROOF_PORT_BITS, _PROOF_LANE_BITS, _PROOF_COUNT_BITS = 2, 32, 16, 5
_SIZES_LOG2 = (2, 3, 4)


def build_proof(dut: Any = None) -> ProofHarness:
    """Group g of a count has its fields 2g and 2g + 1, which lie where they do in the words taken for it."""
    sizes = [1 << log2 for log2 in _SIZES_LOG2]
    dut = (
        FieldUnpack(_PROOF_WIDTH, _PROOF_PORT_BITS, sizes, lane_bits=_PROOF_LANE_BITS, count_bits=_PROOF_COUNT_BITS)
        if dut is None
        else dut
    )
    harness = ProofHarness(dut)
    m = harness.m
    offer(harness, dut.i_count, "i_count")
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    size = harness.free(2, "size")
    m.d.comb += dut.size.eq(size)
    harness.assume(size < len(sizes))

    count, given, words = (
        Signal(_PROOF_COUNT_BITS),
        Signal(_PROOF_COUNT_BITS + 1),
        Signal(_PROOF_COUNT_BITS),
    )  # fields; words taken
    full, data, last = Signal(), Signal(_PROOF_WIDTH * _PROOF_LANE_BITS), Signal()
    active = given < count
    begun = harness.past(moves(dut.i_count), "begun")
    harness.assume(~active | begun | (size == harness.past(size, "size_past")))
    step = active & dut.i.valid & (dut.o.ready | ~full)
    ends = given + _PROOF_WIDTH >= count
    log2 = Array(_SIZES_LOG2)[size]
    at = (given << log2)[:5]  # of the group, within its word
    fields = [(dut.i.payload >> (at + (lane << log2)))[:16] & Array((1 << bits) - 1 for bits in sizes)[size]
              for lane in range(_PROOF_WIDTH)]  # fmt: skip
    word_ends = at + (_PROOF_WIDTH << log2) == _PROOF_PORT_BITS
    m.d.sync += full.eq(step | (full & ~dut.o.ready))
    with m.If(step):
        m.d.sync += [
            data.eq(Cat(Mux(given + lane < count, field, 0) for lane, field in enumerate(fields))),
            last.eq(ends),
            given.eq(given + _PROOF_WIDTH),
            words.eq(words + moves(dut.i)),
        ]
    with m.If(moves(dut.i_count)):
        m.d.sync += [count.eq(dut.i_count.payload), given.eq(0), words.eq(0)]

    filled = ((count << log2) + (_PROOF_PORT_BITS - 1)) >> 5
    harness.prove("a_group_when_there_is_one", dut.o.valid == full)
    harness.prove("same_fields", ~dut.o.valid | (dut.o.payload.data == data))
    harness.prove("last_is_the_counted_one", ~dut.o.valid | (dut.o.payload.last == last))
    harness.prove("a_word_when_it_is_used_up", dut.i.ready == (step & (ends | word_ends)))
    harness.prove("words_are_counted", ~(step & ends) | (words + 1 == filled))
    harness.prove("next_count_behind_the_last_group", dut.i_count.ready == (~active | (step & ends)))
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    harness.no_paths += [(dut.i.valid, dut.o.valid), (dut.i_count.valid, dut.i.ready)]
    harness.cover("seven_bytes", moves(dut.o) & last & (count == 7) & (words == 2) & (size == 1) & (data == 0x11))
    harness.cover("nothing", moves(dut.i_count) & (dut.i_count.payload == 0))
    harness.cover("a_count_with_the_last_group", step & ends & moves(dut.i_count) & (count == 3))

    # Invariants: what is left, and which group of the word on `i` is next.
    used = at >> (log2 + 1)
    harness.prove("inner_some", harness.probe("some", 1) == active)
    harness.prove("inner_left", ~active | (harness.probe("left", _PROOF_COUNT_BITS) == count - given))
    harness.prove("inner_last", ~active | (harness.probe("last", 1) == ends))
    harness.prove("inner_slot", harness.probe("slot", 2) == Mux(active, used, 0))
    harness.prove("inner_given", (given[0] == 0) & (given <= count + 1))
    harness.prove("inner_words", ~active | (words == (given << log2) >> 5))
    return harness


_WIDTH, _PORT_BITS, _LANE_BITS, _COUNT_BITS = 4, 64, 16, 8
_SIZES_BITS = (4, 8, 16)
_COUNTS = 100


def component() -> ObservedStreams:
    """The smallest one of three sizes."""
    return ObservedStreams(FieldUnpack(_WIDTH, _PORT_BITS, _SIZES_BITS, lane_bits=_LANE_BITS, count_bits=_COUNT_BITS))


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Fields of one size."""
    size = int(rng.integers(len(_SIZES_BITS)))
    bits, counts, text, groups = _SIZES_BITS[size], [], b"", list[int]()
    for _ in range(_COUNTS):
        count = int(rng.integers(1 << int(rng.integers(_COUNT_BITS + 1))))
        fields = rng.integers(0, 1 << bits, -(-count * bits // _PORT_BITS) * _PORT_BITS // bits)
        lanes = np.pad(fields[:count], (0, -count % _WIDTH)).reshape(-1, _WIDTH)
        counts.append(count)
        text += join_fields(fields, bits)
        for index, group in enumerate(lanes.tolist()):
            data = sum(field << _LANE_BITS * lane for lane, field in enumerate(group))
            groups.append(data | (index == len(lanes) - 1) << _WIDTH * _LANE_BITS)
    inputs = {"i_count": np.array(counts, np.uint8), "i": np.frombuffer(text, "<u8"), "size": np.array(size)}
    return inputs, {"o": words_from_integers(groups, _WIDTH * _LANE_BITS + 1)}


PROOF = Proof(build_proof, engine="induction", depth=3)
TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=10, cut_cycles=(9, 20, 33))
