"""The skid buffer: two items."""

from typing import Any

from nearflash.gateware.stream.skid import SkidBuffer
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import (
    buffer_harness,
)

__all__ = ["PROOF", "build_proof"]


def build_proof(dut: Any = None) -> ProofHarness:
    """Two items."""
    return buffer_harness(SkidBuffer(1) if dut is None else dut, 2)[0]


PROOF = Proof(build_proof)
