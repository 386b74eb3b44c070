"""The BCH encoder."""

from nearflash.gateware.nand.bch.encoder import Encoder
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, count_beats, moves, offer

__all__ = ["PROOF", "build_proof"]


def build_proof() -> ProofHarness:
    """66 beats in, 69 out; those before the CRC pass unchanged."""
    dut = Encoder()
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    beat = count_beats(harness, dut.o, 69)
    harness.prove("taken_as_given", moves(dut.i) == (moves(dut.o) & (beat < 66)))
    harness.prove("same", ~(dut.o.valid & (beat < 65)) | (dut.o.payload.data == dut.i.payload))
    harness.prove("first", ~dut.o.valid | (dut.o.payload.first == (beat == 0)))
    harness.prove("last", ~dut.o.valid | (dut.o.payload.last == (beat == 68)))
    harness.cover("second_beat", moves(dut.o) & (beat == 1))
    return harness


PROOF = Proof(build_proof)
