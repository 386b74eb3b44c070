"""The rows of values of Top-K streams: their proof."""

from typing import Any

from amaranth.hdl import Cat, Const, Mux, Signal

from nearflash.abi.topk import ValueFormat
from nearflash.gateware.gradients.values import ValueRows
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "build_proof"]


def build_proof(dut: Any = None) -> ProofHarness:
    """A row for every four values of a section; of fp16 only normal numbers are looked at."""
    dut = ValueRows() if dut is None else dut
    harness = ProofHarness(dut)
    m = harness.m
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    form = harness.free(2, "value_format")
    half, some, row, full = Signal(64), Signal(), Signal(128), Signal()  # half a row; a row
    known = Signal(4)  # which values of it
    m.d.comb += dut.value_format.eq(form)
    harness.assume(form < len(ValueFormat))
    harness.assume(~some | (form == harness.past(form, "form_past")))

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
    harness.prove("a_row_for_four_values", dut.o.valid == full)
    for k in range(4):
        here = [value.word_select(k, 32) for value in (dut.o.payload, row)]
        harness.prove(f"same_value_{k}", ~(dut.o.valid & known[k]) | (here[0] == here[1]))
    harness.prove("takes_a_word_when_there_is_room", dut.i.ready == (dut.o.ready | ~full))
    harness.prove("inner_second", harness.probe("second", 1) == some)
    harness.prove("inner_half", ~some | (dut.o.payload[:64] == half))
    harness.no_paths += [(dut.i.valid, dut.o.valid), (dut.i.valid, dut.i.ready)]
    harness.cover("a_row_of_two_words", moves(dut.o) & wide & (known == 15) & (row[64:] != 0))
    harness.cover("half_a_row", moves(dut.o) & (known == 3) & (row[:64] != 0))
    return harness


PROOF = Proof(build_proof, engine="induction", depth=3)
