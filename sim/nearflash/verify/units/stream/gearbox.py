"""The gearboxes: ratio 3."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.stream.gearbox import Narrow, Widen
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOFS", "build_narrow_proof", "build_widen_proof"]


def build_narrow_proof() -> ProofHarness:
    """Ratio 3, counts up to 7. Each group carries its number in the transfer, so order shows in the data."""
    ratio, bits = 3, 4
    dut = Narrow(bits, ratio, count_width=3)
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    offer(harness, dut.i_count, "i_count")
    accept(harness, dut.o)
    check_source(harness, dut.o)
    beats, out = Signal(2), Signal(bits)  # beats taken of the transfer on i, groups given of that on o
    first, second, transfers = Signal(3), Signal(3), Signal(2)  # counts without their last group, oldest first
    empty = dut.i_count.payload == 0
    begins, ends = moves(dut.i_count) & ~empty, moves(dut.o) & dut.o.payload.last
    fresh = dut.o.valid & ~harness.past(dut.o.valid & ~dut.o.ready, "waited")
    beat = Mux(fresh & dut.o.payload.last, 0, beats)  # which one of its transfer is on i
    harness.m.d.sync += [beats.eq(beat + moves(dut.i)), transfers.eq(transfers + begins - ends)]
    with harness.m.If(moves(dut.o)):
        harness.m.d.sync += out.eq(Mux(dut.o.payload.last, 0, out + 1))
    with harness.m.If(ends):
        harness.m.d.sync += first.eq(second)
    with harness.m.If(begins):
        with harness.m.If(transfers == ends):
            harness.m.d.sync += first.eq(dut.i_count.payload)
        with harness.m.Else():
            harness.m.d.sync += second.eq(dut.i_count.payload)
    harness.assume(dut.i.payload == Cat((beat * ratio + slot)[:bits] for slot in range(ratio)))

    harness.prove("no_group_without_count", ~dut.o.valid | (transfers != 0))
    harness.prove("one_count_ahead", transfers <= 2)
    harness.prove("groups_in_order", ~dut.o.valid | (dut.o.payload.data == out))
    harness.prove("last_is_the_counted_one", ~dut.o.valid | (dut.o.payload.last == (out + 1 == first)))
    harness.prove("beats_are_counted", ~(fresh & dut.o.payload.last) | (beats == (first + (ratio - 1)) // ratio))
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    harness.cover("tail", ends & (first == 4))
    harness.cover("seven", ends & (first == 7))
    harness.cover("empty_transfer", moves(dut.i_count) & empty)
    return harness


def build_widen_proof() -> ProofHarness:
    """Ratio 3: each beat equals a copy that the harness collects by itself."""
    ratio, bits = 3, 2
    dut = Widen(bits, ratio, strb_bits=1)
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    m = harness.m
    data, strb, slot = Signal(bits * ratio), Signal(ratio), Signal(range(ratio))
    full, last = Signal(), Signal()
    group = dut.i.payload
    ends = group.last | (slot == ratio - 1)
    with m.If(moves(dut.o)):
        m.d.sync += [full.eq(0), strb.eq(0)]
    with m.If(moves(dut.i)):
        m.d.sync += [
            data.word_select(slot, bits).eq(group.data),
            strb.bit_select(slot, 1).eq(group.strb),
            slot.eq(Mux(ends, 0, slot + 1)),
            full.eq(ends),
            last.eq(group.last),
        ]
    live = Cat(bit.replicate(bits) for bit in strb)
    harness.prove("beat_when_complete", dut.o.valid == full)
    harness.prove("same_strobes", ~dut.o.valid | (dut.o.payload.strb == strb))
    harness.prove("same_data", ~dut.o.valid | (((dut.o.payload.data ^ data) & live) == 0))
    harness.prove("same_last", ~dut.o.valid | (dut.o.payload.last == last))
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    harness.cover("full_beat", moves(dut.o) & strb.all())
    harness.cover("short_beat_at_full_rate", moves(dut.o) & last & (strb == 0b01) & moves(dut.i))
    return harness


PROOFS = {"narrow": Proof(build_narrow_proof), "widen": Proof(build_widen_proof)}
