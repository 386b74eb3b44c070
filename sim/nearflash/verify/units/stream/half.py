"""The half buffer: one item."""

from typing import Any

from nearflash.gateware.stream.half import HalfBuffer
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import buffer_harness

__all__ = ["PROOF", "build_proof"]


def build_proof(dut: Any = None) -> ProofHarness:
    """One item."""
    return buffer_harness(HalfBuffer(1) if dut is None else dut, 1)[0]


PROOF = Proof(build_proof)
