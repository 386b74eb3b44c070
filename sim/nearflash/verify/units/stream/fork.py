"""The fork: three outputs."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.stream.fork import Fork
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "build_proof"]


def build_proof() -> ProofHarness:
    """Three outputs: each gets every item exactly once."""
    dut = Fork(2, 3)
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    had = Signal(3)  # which outputs have had the item that is on i
    for index, o in enumerate(dut.o):
        accept(harness, o, f"o{index}")
        check_source(harness, o, f"o{index}")
        harness.prove(f"o{index}_once", o.valid == (dut.i.valid & ~had[index]))
        harness.prove(f"o{index}_same", ~o.valid | (o.payload == dut.i.payload))
    got = had | Cat(moves(o) for o in dut.o)
    harness.m.d.sync += had.eq(Mux(moves(dut.i), 0, got))
    harness.prove("taken_when_all_have_it", ~dut.i.valid | (dut.i.ready == got.all()))
    harness.cover("one_waits_for_two", (had == 0b101) & moves(dut.i))
    return harness


PROOF = Proof(build_proof)
