"""The join: two inputs."""

from amaranth.hdl import Cat

from nearflash.gateware.stream.join import Join
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "build_proof"]


def build_proof() -> ProofHarness:
    """Two inputs."""
    dut = Join({"key": 1, "score": 2})
    harness = ProofHarness(dut)
    offer(harness, dut.i.key, "key")
    offer(harness, dut.i.score, "score")
    accept(harness, dut.o)
    check_source(harness, dut.o)
    harness.prove("valid_when_both_are", dut.o.valid == (dut.i.key.valid & dut.i.score.valid))
    harness.prove("taken_together", Cat(moves(dut.i.key), moves(dut.i.score)) == moves(dut.o).replicate(2))
    same = (dut.o.payload.key == dut.i.key.payload) & (dut.o.payload.score == dut.i.score.payload)
    harness.prove("same_items", ~dut.o.valid | same)
    harness.cover("both", moves(dut.o))
    return harness


PROOF = Proof(build_proof)
