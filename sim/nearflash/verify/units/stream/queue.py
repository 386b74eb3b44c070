"""The queue of three items, in each kind of memory."""

from nearflash.gateware.stream.queue import QueueMemory, StreamQueue
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import buffer_harness

__all__ = ["PROOFS", "build_proof"]


def build_proof(memory: QueueMemory) -> ProofHarness:
    """Three items; `level` counts them."""
    dut = StreamQueue(1, 3, memory=memory)
    harness, inside = buffer_harness(dut, 3)
    harness.prove("level_counts_items", dut.level == inside)
    return harness


PROOFS = {
    "distributed": Proof(lambda: build_proof("distributed")),
    "block": Proof(lambda: build_proof("block")),
}
