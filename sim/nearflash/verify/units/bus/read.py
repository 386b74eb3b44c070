"""The burst reader: a 32-bit bus, bursts of up to 4 beats, 2 outstanding."""

from amaranth.hdl import Signal, Value

from nearflash.gateware.bus.read import BurstReader
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import BurstLog, accept, check_address, moves, offer

__all__ = ["PROOF", "build_proof"]

_BEATS, _BYTES = 4, 4  # of a burst, of a beat
_OUTSTANDING = 2
_QUEUE_BEATS = 6


def build_proof() -> ProofHarness:
    """Bursts are legal and have room; the responses find their places; errors are kept."""
    dut = BurstReader(
        8 * _BYTES, max_outstanding=_OUTSTANDING, max_burst_bytes=_BEATS * _BYTES, queue_beats=_QUEUE_BEATS
    )
    harness = ProofHarness(dut)
    bus = dut.bus
    offer(harness, dut.i_command, "command")
    accept(harness, dut.o)
    responds = harness.free(1, "rvalid")
    last, response = harness.free(1, "rlast"), harness.free(2, "rresp")
    harness.m.d.comb += [
        bus.arready.eq(harness.free(1, "arready")),
        bus.rvalid.eq(responds),
        bus.rdata.eq(harness.free(32, "rdata")),
        bus.rlast.eq(last),
        bus.rresp.eq(response),
        dut.clear.eq(harness.free(1, "clear")),
    ]
    check_address(harness, bus, "ar", _BEATS)
    asked = BurstLog(harness, bus.arvalid & bus.arready, bus.arlen, responds & bus.rready, _OUTSTANDING, "asked")
    harness.assume(~responds | ((asked.count != 0) & (last == asked.at_last)))

    harness.prove("outstanding_kept", asked.count <= _OUTSTANDING)
    harness.prove("room_for_every_response", ~responds | bus.rready)
    harness.prove("idle_means_nothing_left", ~dut.idle | ((asked.count == 0) & ~dut.o.valid & ~bus.arvalid))
    seen, kept = Signal(), Signal(2)
    with harness.m.If(dut.clear):
        harness.m.d.sync += seen.eq(0)
    with harness.m.Elif(responds & response[1] & ~seen):
        harness.m.d.sync += [seen.eq(1), kept.eq(response)]
    harness.prove("first_error_kept", (dut.error.seen == seen) & (~seen | (Value.cast(dut.error.response) == kept)))
    harness.cover("two_bursts_in_flight", asked.count == _OUTSTANDING)
    harness.cover("idle_after_a_burst", dut.idle & harness.past(moves(dut.o), "moved"))
    return harness


PROOF = Proof(build_proof)
