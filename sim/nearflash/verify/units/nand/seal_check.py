"""The seal check."""

from nearflash.gateware.nand.seal_check import SealCheck
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, count_beats, moves, offer

__all__ = ["PROOF", "build_proof"]


def build_proof() -> ProofHarness:
    """Beats pass one for one; a page tag stays for the 66 beats of its codeword."""
    dut = SealCheck()
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    offer(harness, dut.i_page_tag, "i_page_tag")
    accept(harness, dut.o)
    check_source(harness, dut.o)
    beat = count_beats(harness, dut.o, 66)
    harness.prove("one_for_one", moves(dut.i) == moves(dut.o))
    harness.prove("same", ~dut.o.valid | (dut.o.payload.data == dut.i.payload))
    harness.prove("last", ~dut.o.valid | (dut.o.payload.last == (beat == 65)))
    harness.prove("a_tag_a_codeword", moves(dut.i_page_tag) == (moves(dut.o) & dut.o.payload.last))
    harness.cover("second_beat", moves(dut.o) & (beat == 1))
    return harness


PROOF = Proof(build_proof)
