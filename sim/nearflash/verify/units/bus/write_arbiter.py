"""The write arbiter: a 32-bit bus, two masters, 2 bursts outstanding."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.bus.write_arbiter import WriteArbiter
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import OwnerLog

__all__ = ["PROOF", "build_proof"]

_BYTES = 4  # of a beat
_OUTSTANDING = 2


def build_proof() -> ProofHarness:
    """Two masters: each burst goes out once, W has the data of its owners in order, responses go to their owners."""
    dut = WriteArbiter(2, 8 * _BYTES, max_outstanding=_OUTSTANDING)
    harness = ProofHarness(dut)
    bus = dut.bus
    responds = harness.free(1, "bvalid")
    harness.m.d.comb += [
        bus.awready.eq(harness.free(1, "awready")),
        bus.wready.eq(harness.free(1, "wready")),
        bus.bvalid.eq(responds),
        bus.bresp.eq(harness.free(2, "bresp")),
    ]
    taken, data = [], []
    for index, port in enumerate(dut.port):
        asks, burst = harness.free(1, f"asks_{index}"), harness.free(72, f"burst_{index}")
        waits = harness.past(asks & ~port.awready, f"waits_{index}")
        harness.assume(~waits | (asks & (burst == harness.past(burst, f"burst_{index}_past"))))
        sends, beat = harness.free(1, f"sends_{index}"), harness.free(9 * _BYTES + 1, f"beat_{index}")
        harness.m.d.comb += [
            port.awvalid.eq(asks),
            Cat(port.awaddr, port.awlen).eq(burst),
            port.wvalid.eq(sends),
            Cat(port.wdata, port.wstrb, port.wlast).eq(beat),
            port.bready.eq(harness.free(1, f"bready_{index}")),
        ]
        taken.append((asks & port.awready, burst))
        data.append((sends, beat))
    begun = taken[0][0] | taken[1][0]
    pending = harness.past(begun, "begun") | harness.past(bus.awvalid & ~bus.awready, "bus_waits")
    expected = Signal(72)
    with harness.m.If(begun):
        harness.m.d.sync += expected.eq(Mux(taken[1][0], taken[1][1], taken[0][1]))
    sent, responded = bus.wvalid & bus.wready & bus.wlast, responds & bus.bready
    writing = OwnerLog(harness, begun, taken[1][0], sent, _OUTSTANDING, "writing")
    waiting = OwnerLog(harness, begun, taken[1][0], responded, _OUTSTANDING, "waiting")
    # A response comes for a burst whose address and data have gone.
    harness.assume(~responds | (waiting.count > writing.count) & (waiting.count > bus.awvalid))

    harness.prove("one_at_a_time", ~(taken[0][0] & taken[1][0]))
    harness.prove("bus_asks_what_was_taken", bus.awvalid == pending)
    harness.prove("same_burst", ~bus.awvalid | (Cat(bus.awaddr, bus.awlen) == expected))
    harness.prove("outstanding_kept", (waiting.count <= _OUTSTANDING) & (writing.count <= waiting.count))
    for index, port in enumerate(dut.port):
        sends, beat = data[index]
        mine = writing.waits & (writing.first == index)
        harness.prove(f"data_of_owner_{index}", ~mine | (bus.wvalid == sends))
        harness.prove(f"data_same_{index}", ~mine | (Cat(bus.wdata, bus.wstrb, bus.wlast) == beat))
        harness.prove(f"data_taken_{index}", port.wready == (mine & bus.wready))
        asked = waiting.waits & (waiting.first == index)
        harness.prove(f"response_to_owner_{index}", port.bvalid == (responds & asked))
        harness.prove(f"response_taken_{index}", ~asked | (bus.bready == port.bready))
        harness.prove(f"response_same_{index}", port.bresp == bus.bresp)
        other, passed = taken[1 - index][0], Signal(name=f"passed_{index}")
        harness.m.d.sync += passed.eq(port.awvalid & ~taken[index][0] & (passed | other))
        harness.prove(f"fair_{index}", ~(passed & other))
    harness.prove("no_data_without_burst", ~bus.wvalid | writing.waits)
    harness.prove("not_after_reset", ~harness.was_reset | ~(bus.awvalid | bus.wvalid))
    harness.prove("inner_data", harness.probe("data.level", 2) == writing.count)
    harness.prove("inner_responses", harness.probe("responses.level", 2) == waiting.count)
    harness.no_paths += [(bus.awready, bus.awvalid), (bus.wready, bus.wvalid), (bus.awready, bus.wvalid)]
    harness.cover("two_owners", (writing.count == 2) & sent & ~writing.first)
    harness.cover(
        "both_responded", responded & waiting.first & harness.past(responded & ~waiting.first, "responded_first")
    )
    return harness


PROOF = Proof(build_proof)
