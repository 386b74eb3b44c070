"""The control words of a kernel."""

from amaranth.hdl import Array, Cat, Const, Mux, Signal

from nearflash.abi.registers import UPDATE
from nearflash.gateware.bus.control import KernelControl
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof

__all__ = ["PROOF", "build_proof"]


def build_proof() -> ProofHarness:
    """Starts and completions are neither lost nor invented; what is read and the interrupt follow from them."""
    dut = KernelControl(UPDATE)
    harness = ProofHarness(dut)
    for name in ("write", "write_offset", "write_data", "read", "read_offset", "done"):
        port = getattr(dut, name)
        harness.m.d.comb += port.eq(harness.free(port.shape(), name))
    asked, again, running, finished, ready = (
        Signal(name=name) for name in ("asked", "again", "ran", "finished", "took")
    )
    enabled, mask, status = Signal(), Signal(2), Signal(2)  # of the interrupt
    to_control = dut.write & (dut.write_offset == UPDATE["control"].offset)
    with harness.m.If(to_control):
        harness.m.d.sync += again.eq(dut.write_data[7])
    with harness.m.If(dut.write & (dut.write_offset == UPDATE["interrupt_enable"].offset)):
        harness.m.d.sync += enabled.eq(dut.write_data[0])
    with harness.m.If(dut.write & (dut.write_offset == UPDATE["interrupt_mask"].offset)):
        harness.m.d.sync += mask.eq(dut.write_data)
    toggled = Mux(dut.write & (dut.write_offset == UPDATE["interrupt_status"].offset), dut.write_data[:2], 0)
    polled = dut.read & (dut.read_offset == UPDATE["control"].offset)
    acknowledged = polled | (to_control & dut.write_data[4])
    harness.m.d.sync += [
        asked.eq(Mux(dut.done, again, asked | (to_control & dut.write_data[0]))),
        running.eq(~dut.done & (running | dut.start)),
        finished.eq(dut.done | (finished & ~acknowledged)),
        ready.eq(dut.done | (ready & ~polled)),
        status.eq(Mux(dut.done, status | mask, status ^ toggled)),
    ]

    harness.prove("starts_when_asked_and_free", dut.start == (asked & ~running & (~finished | again)))
    word = Cat(asked, finished, ~asked & ~running, ready, Const(0, 3), again)
    expected = Array([word, enabled, mask, status])[dut.read_offset[2:]]
    harness.prove("words_read_right", (dut.read_offset[:2] != 0) | (dut.read_data == expected))
    harness.prove("interrupt_while_enabled", dut.interrupt == (enabled & status.any()))
    harness.cover("second_run", dut.start & harness.past(acknowledged, "was_acknowledged"))
    return harness


PROOF = Proof(build_proof)
