"""The run finder."""

from amaranth.hdl import Mux, Signal

from nearflash.gateware.nand.runs import RunFinder
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "build_proof"]


def build_proof() -> ProofHarness:
    """Masks of two pages of up to four codewords: every bit in exactly one run, ascending, as long as can be."""
    dut = RunFinder()
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    mask, run = dut.i.payload.codewords, dut.o.payload
    harness.assume((dut.i.payload.page_log2 <= 2) & (mask[8:] == 0) & (mask != 0))
    harness.assume(Mux(dut.i.payload.page_log2 == 2, 1, mask[4:] == 0))
    harness.assume(Mux(dut.i.payload.page_log2 != 0, 1, mask[2:] == 0))

    left, page_log2 = Signal(8), Signal(2)  # bits of the mask that no run has had
    had = Signal(2)  # pages that had a run
    bits = Signal(8)
    harness.m.d.comb += bits.eq(((1 << run.count[:4]) - 1) << run.number[:3])
    first, end = run.number[:3], Signal(4)
    harness.m.d.comb += end.eq(first + run.count)
    page = Mux(run.second, 1, 0)
    with harness.m.If(moves(dut.i)):
        harness.m.d.sync += [left.eq(mask), page_log2.eq(dut.i.payload.page_log2), had.eq(0)]
    with harness.m.If(moves(dut.o)):
        harness.m.d.sync += [left.eq(left & ~bits), had.bit_select(page, 1).eq(1)]
    harness.prove("each_bit_once", ~dut.o.valid | ((bits & ~left) == 0) & (run.count != 0) & (end <= 8))
    harness.prove("ascending", ~dut.o.valid | ((left & ((1 << first) - 1)) == 0))
    harness.prove("all_bits", ~dut.o.valid | (run.last == ((left & ~bits) == 0)))
    harness.prove("masks_apart", ~moves(dut.i) | (left == 0))
    harness.prove(
        "within_a_page", ~dut.o.valid | ((first >> page_log2) == run.second) & (((end - 1) >> page_log2) == run.second)
    )
    harness.prove("place", ~dut.o.valid | (run.place == (first & ((1 << page_log2) - 1))))
    grows = (left >> end)[0] & ((end >> page_log2) == run.second)
    harness.prove("as_long_as_can_be", ~dut.o.valid | ~grows)
    harness.prove("fresh", ~dut.o.valid | (run.fresh == ~had.bit_select(page, 1)))
    harness.cover("second_page", moves(dut.o) & run.second & run.last & (run.count == 2))
    return harness


PROOF = Proof(build_proof)
