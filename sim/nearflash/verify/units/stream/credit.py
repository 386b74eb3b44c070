"""The credit pipeline: latency 2, a queue of three results."""

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.stream.credit import CreditPipeline
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import buffer_harness

__all__ = ["PROOF", "build_proof"]


class _Delay(wiring.Component):
    """A datapath of two registers in a `CreditPipeline` whose queue holds three results."""

    i: In(stream.Signature(1))
    o: Out(stream.Signature(1))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.credit = credit = CreditPipeline(2, 1, 1, depth=3)
        wiring.connect(m, wiring.flipped(self.i), credit.i)
        wiring.connect(m, credit.o, wiring.flipped(self.o))
        stage = Signal(reset_less=True)
        result = Signal(reset_less=True)
        m.d.sync += [stage.eq(credit.core_i), result.eq(stage)]
        m.d.comb += credit.core_o.eq(result)
        return m


def build_proof() -> ProofHarness:
    """Latency 2, three places."""
    return buffer_harness(_Delay(), 3)[0]


PROOF = Proof(build_proof)
