"""The write widener: 32-bit beats on a 64-bit port, bursts of up to 4 beats, 2 in its queues."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.bus.write_widener import WriteWidener
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import BurstLog, OwnerLog

__all__ = ["PROOF", "build_proof"]

_BITS, _WIDE_BITS = 32, 64
_BEATS = 4
_OUTSTANDING = 2
_OPEN = _OUTSTANDING + 2
"""Bursts between AW and the last wide beat: of the queue, the one at hand, the one whose beat waits."""


def build_proof() -> ProofHarness:
    """Each burst goes out once, as wide beats with the bytes and strobes of its lanes, the last one marked."""
    dut = WriteWidener(_BITS, _WIDE_BITS, max_outstanding=_OUTSTANDING)
    harness = ProofHarness(dut)
    m, port, bus = harness.m, dut.port, dut.bus
    asks, burst = harness.free(1, "asks"), harness.free(72, "burst")
    sends, beat = harness.free(1, "sends"), harness.free(_BITS + _BITS // 8, "beat")
    m.d.comb += [
        port.awvalid.eq(asks),
        Cat(port.awaddr, port.awlen).eq(burst),
        port.wvalid.eq(sends),
        Cat(port.wdata, port.wstrb).eq(beat),
        port.bready.eq(harness.free(1, "bready")),
        bus.awready.eq(harness.free(1, "awready")),
        bus.wready.eq(harness.free(1, "wready")),
        bus.bvalid.eq(harness.free(1, "bvalid")),
        bus.bresp.eq(harness.free(2, "bresp")),
    ]
    waits = harness.past(asks & ~port.awready, "waits")
    harness.assume(~waits | (asks & (burst == harness.past(burst, "burst_past"))))
    harness.assume((port.awaddr[:2] == 0) & (port.awaddr[2:4] + port.awlen < _BEATS))
    begins, takes, leaves = asks & port.awready, sends & port.wready, bus.wvalid & bus.wready
    given = BurstLog(harness, begins, port.awlen, takes, _OPEN, "given")
    lanes = OwnerLog(harness, begins, port.awaddr[2], takes & given.at_last, _OPEN, "lane")
    sent = BurstLog(harness, begins, (port.awaddr[2] + port.awlen) >> 1, leaves, _OPEN, "sent")
    lane = lanes.first ^ given.index[0]
    # What the beat that waits, or is being filled, must be.
    data, strobes, filled = Signal(_WIDE_BITS), Signal(_WIDE_BITS // 8), Signal()
    with m.If(takes):
        m.d.sync += [
            data.word_select(lane, _BITS).eq(port.wdata),
            strobes.eq(Mux(filled, 0, strobes) | (port.wstrb << Mux(lane, _BITS // 8, 0))),
            filled.eq(lane | given.at_last),
        ]
    stuck = harness.past(bus.wvalid & ~bus.wready, "w_waits")
    shown = Cat(bus.wdata, bus.wstrb, bus.wlast)
    harness.prove("of_an_open_burst", ~takes | (given.count != 0))
    harness.prove("last_is_marked", ~bus.wvalid | ((sent.count != 0) & (bus.wlast == sent.at_last)))
    harness.prove("its_strobes", ~bus.wvalid | (filled & (bus.wstrb == strobes)))
    harness.prove("its_lanes", ~bus.wvalid | ~strobes.any() | (bus.wdata == data))
    harness.prove("w_stable", ~stuck | (bus.wvalid & (shown == harness.past(shown, "shown_past"))))
    harness.prove("whole_beats", ~bus.awvalid | ((bus.awaddr[:3] == 0) & (bus.awaddr[3] + bus.awlen < _BEATS // 2)))
    harness.prove("full_beats", (bus.awsize == 3) & (bus.awburst == 1))
    harness.prove(
        "responses_pass", (port.bvalid == bus.bvalid) & (port.bresp == bus.bresp) & (bus.bready == port.bready)
    )
    harness.no_paths += [(bus.awready, bus.awvalid), (bus.wready, bus.wvalid), (bus.awready, bus.wvalid)]
    harness.cover("from_the_second_lane", leaves & bus.wlast & (bus.wstrb == 0b1111) & (sent.index == 1))
    return harness


PROOF = Proof(build_proof)
