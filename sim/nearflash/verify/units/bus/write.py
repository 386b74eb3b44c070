"""The burst writer: a 32-bit bus, bursts of up to 4 beats, 2 outstanding."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.bus.write import BurstWriter
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import BurstLog, check_address, offer

__all__ = ["PROOF", "build_proof"]

_BEATS, _BYTES = 4, 4  # of a burst, of a beat
_OUTSTANDING = 2
_QUEUE_BEATS = 6


def build_proof() -> ProofHarness:
    """Bursts are legal and complete; W gives AWLEN + 1 beats without a pause; responses are counted."""
    dut = BurstWriter(
        8 * _BYTES, max_outstanding=_OUTSTANDING, max_burst_bytes=_BEATS * _BYTES, queue_beats=_QUEUE_BEATS
    )
    harness = ProofHarness(dut)
    bus = dut.bus
    offer(harness, dut.i_command, "command")
    offer(harness, dut.i)
    responds, response = harness.free(1, "bvalid"), harness.free(2, "bresp")
    harness.m.d.comb += [
        bus.awready.eq(harness.free(1, "awready")),
        bus.wready.eq(harness.free(1, "wready")),
        bus.bvalid.eq(responds),
        bus.bresp.eq(response),
    ]
    check_address(harness, bus, "aw", _BEATS)
    fresh = bus.awvalid & ~harness.past(bus.awvalid & ~bus.awready, "waited")
    sent = bus.wvalid & bus.wready
    data = BurstLog(harness, fresh, bus.awlen, sent, _OUTSTANDING, "data")
    begun, written = Signal(range(_OUTSTANDING + 2)), Signal(range(_OUTSTANDING + 2))  # without a response
    harness.m.d.sync += [
        begun.eq(begun + (bus.awvalid & bus.awready) - responds),
        written.eq(written + (sent & bus.wlast) - responds),
    ]
    harness.assume(~responds | ((begun != 0) & (written != 0)))

    harness.prove("outstanding_kept", begun <= _OUTSTANDING)
    harness.prove("no_data_without_burst", ~bus.wvalid | (data.count != 0))
    harness.prove("last_is_the_last", ~bus.wvalid | (bus.wlast == data.at_last))
    harness.prove("no_pause_inside_a_burst", (data.index == 0) | bus.wvalid)
    waits = harness.past(bus.wvalid & ~bus.wready, "w_waits")
    beat = Cat(bus.wdata, bus.wstrb, bus.wlast)
    harness.prove("w_stable_until_ready", ~waits | (bus.wvalid & (beat == harness.past(beat, "w_past"))))
    harness.prove("responses_are_taken", ~responds | bus.bready)
    harness.prove("idle_means_nothing_left", ~dut.idle | ((begun == 0) & (data.count == 0) & ~bus.awvalid))
    harness.no_paths += [(bus.awready, bus.wvalid), (bus.wready, bus.wvalid)]

    # Invariants, so that the engine need not find them: how the component's counts follow from what was seen outside.
    waited = harness.past(bus.awvalid & ~bus.awready, "aw_waited")
    due = Signal(range(4 * _QUEUE_BEATS))  # beats of open bursts that W still has to give
    harness.m.d.sync += due.eq(due + Mux(fresh, bus.awlen + 1, 0) - sent)
    served, unclaimed = harness.probe("fork.served", 2), harness.probe("unclaimed_beats", 4)
    level, waiting = harness.probe("data.level", 3), Mux(bus.awvalid, bus.awlen + 1, 0)
    harness.prove("inner_fork", ~served[0] & (served[1] == waited) & (~waited | bus.awvalid))
    harness.prove("inner_open", harness.probe("bursts.level", 2) == begun)
    open_burst, left = harness.probe("open_burst", 1), harness.probe("left", 8)
    harness.prove("inner_lengths", harness.probe("lengths.level", 2) + open_burst == data.count)
    harness.prove("inner_left", Mux(open_burst, left == data.length - data.index, data.index == 0))
    harness.prove("inner_last", ~open_burst | (harness.probe("last", 1) == (left == 0)))
    harness.prove("inner_written", written + data.count == begun + waited)
    harness.prove("inner_due", due == data.beats_left)
    complete = harness.probe("complete", 1)
    harness.prove("inner_complete", ~complete | (harness.probe("split.o__valid", 1) & harness.probe("enough", 1)))
    harness.prove("inner_level", level + waiting == unclaimed + due + Mux(fresh, waiting, 0))
    harness.cover("two_bursts_in_flight", (begun == _OUTSTANDING) & (written == 0))
    harness.cover("data_before_address", sent & waits & bus.awvalid)
    return harness


PROOF = Proof(build_proof)
