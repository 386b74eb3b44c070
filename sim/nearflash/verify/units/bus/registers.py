"""The register file: the control words and two registers."""

from amaranth.hdl import Cat, Mux, Signal
from amaranth.lib.wiring import In

from nearflash.abi.fields import Access, Register, RegisterMap
from nearflash.abi.registers import UPDATE
from nearflash.gateware.bus.axi import AxiResponse
from nearflash.gateware.bus.registers import RegisterFile
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof

__all__ = ["PROOF", "build_proof"]


def build_proof() -> ProofHarness:
    """Every access has one response; a register changes by its own writes only, byte by byte."""
    words = [register for register in UPDATE if register.access is Access.CONTROL]
    words += [Register("value", 0x10, 32, Access.RW, ""), Register("state", 0x14, 32, Access.RO, "")]
    dut = RegisterFile(RegisterMap("small", 0x20, tuple(words)))
    harness = ProofHarness(dut)
    bus = dut.bus
    for path, member, _ in bus.signature.flatten(bus):
        if member.flow is In:  # of the bus as seen by its slave
            harness.m.d.comb += getattr(bus, path[0]).eq(harness.free(member.shape, path[0]))
    state = harness.free(32, "state")
    harness.m.d.comb += [dut.done.eq(harness.free(1, "done")), dut.status.state.eq(state)]

    writes, reads = bus.awvalid & bus.awready, bus.arvalid & bus.arready
    owed_b, owed_r = Signal(), Signal()
    harness.m.d.sync += [owed_b.eq(writes | (owed_b & ~bus.bready)), owed_r.eq(reads | (owed_r & ~bus.rready))]
    harness.prove("address_and_data_together", writes == (bus.wvalid & bus.wready))
    harness.prove("one_response_per_write", (bus.bvalid == owed_b) & ~(owed_b & ~bus.bready & writes))
    harness.prove("one_response_per_read", (bus.rvalid == owed_r) & ~(owed_r & ~bus.rready & reads))
    for name, waits, response in (
        ("b", bus.bvalid & ~bus.bready, bus.bresp),
        ("r", bus.rvalid & ~bus.rready, Cat(bus.rresp, bus.rdata)),
    ):
        stable = response == harness.past(response, f"{name}_past")
        harness.prove(f"{name}_stable_until_ready", ~harness.past(waits, f"{name}_waits") | stable)

    value, index = Signal(32), bus.awaddr[2:]
    with harness.m.If(writes & (index == 4)):
        for byte, strobe in enumerate(bus.wstrb):
            with harness.m.If(strobe):
                harness.m.d.sync += value.word_select(byte, 8).eq(bus.wdata.word_select(byte, 8))
    harness.prove("value_is_what_was_written", dut.values.value == value)
    refused = harness.past(writes & (index > 4), "refused")
    harness.prove("rejected_writes_get_an_error", ~refused | (bus.bresp == AxiResponse.SLVERR))
    asked = harness.past(Mux(reads, bus.araddr[2:], 0), "asked")
    harness.prove("state_is_read", (asked != 5) | (bus.rdata == harness.past(state, "state_past")))
    harness.prove("value_is_read", (asked != 4) | (bus.rdata == harness.past(dut.values.value, "value_past")))
    harness.no_paths += [(bus.bready, bus.bvalid), (bus.rready, bus.rvalid), (bus.awvalid, bus.bvalid)]
    harness.cover("back_to_back_reads", (asked == 5) & reads)
    harness.cover("kernel_starts", dut.start)
    return harness


PROOF = Proof(build_proof, engine="induction", depth=3)
