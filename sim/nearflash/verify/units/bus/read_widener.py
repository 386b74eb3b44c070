"""The read widener: 32-bit beats on a 64-bit port, bursts of up to 4 beats, 2 in its queue."""

from amaranth.hdl import Cat

from nearflash.gateware.bus.read_widener import ReadWidener
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import BurstLog, OwnerLog

__all__ = ["PROOF", "build_proof"]

_BITS, _WIDE_BITS = 32, 64
_BEATS = 4
_OUTSTANDING = 2


def build_proof() -> ProofHarness:
    """Each burst is asked for once, as wide beats; each narrow beat is its lane's; both ends come together."""
    dut = ReadWidener(_BITS, _WIDE_BITS, max_outstanding=_OUTSTANDING)
    harness = ProofHarness(dut)
    port, bus = dut.port, dut.bus
    asks, burst = harness.free(1, "asks"), harness.free(72, "burst")
    responds, last = harness.free(1, "rvalid"), harness.free(1, "rlast")
    harness.m.d.comb += [
        port.arvalid.eq(asks),
        Cat(port.araddr, port.arlen).eq(burst),
        port.rready.eq(harness.free(1, "rready")),
        bus.arready.eq(harness.free(1, "arready")),
        bus.rvalid.eq(responds),
        bus.rdata.eq(harness.free(_WIDE_BITS, "rdata")),
        bus.rresp.eq(harness.free(2, "rresp")),
        bus.rlast.eq(last),
    ]
    waits = harness.past(asks & ~port.arready, "waits")
    harness.assume(~waits | (asks & (burst == harness.past(burst, "burst_past"))))
    harness.assume((port.araddr[:2] == 0) & (port.araddr[2:4] + port.arlen < _BEATS))
    begins, takes = asks & port.arready, port.rvalid & port.rready
    given = BurstLog(harness, begins, port.arlen, takes, _OUTSTANDING + 1, "given")
    lanes = OwnerLog(harness, begins, port.araddr[2], takes & port.rlast, _OUTSTANDING + 1, "lane")
    asked = BurstLog(harness, begins, bus.arlen, responds & bus.rready, _OUTSTANDING + 1, "asked")
    harness.assume(~responds | ((asked.count != 0) & (last == asked.at_last)))
    lane = lanes.first ^ given.index[0]

    harness.prove("asked_once", begins == (bus.arvalid & bus.arready))
    harness.prove("whole_beats", ~bus.arvalid | ((bus.araddr[:3] == 0) & (bus.araddr[3:] == port.araddr[3:])))
    harness.prove("no_crossing", ~bus.arvalid | (bus.araddr[3] + bus.arlen < _BEATS // 2))
    harness.prove("full_beats", (bus.arsize == 3) & (bus.arburst == 1))
    harness.prove("waits_for_the_slave", ~harness.past(bus.arvalid & ~bus.arready, "bus_waits") | bus.arvalid)
    harness.prove("outstanding_kept", given.count <= _OUTSTANDING + 1)
    harness.prove("of_an_open_burst", ~port.rvalid | (responds & (given.count != 0)))
    harness.prove("last_of_each", ~port.rvalid | (port.rlast == given.at_last))
    harness.prove("its_lane", ~port.rvalid | (port.rdata == bus.rdata.word_select(lane, _BITS)))
    harness.prove("its_response", ~port.rvalid | (port.rresp == bus.rresp))
    harness.prove("taken_with_its_last_lane", (responds & bus.rready) == (takes & (lane | port.rlast)))
    harness.prove("both_end_together", ~takes | (port.rlast == (bus.rready & last)))
    harness.no_paths += [(bus.arready, bus.arvalid), (port.rready, port.rvalid)]
    harness.cover("three_bursts", (given.count == _OUTSTANDING + 1) & takes & port.rlast)
    harness.cover("from_the_second_lane", takes & port.rlast & lanes.first & (given.index == 2))
    return harness


PROOF = Proof(build_proof)
