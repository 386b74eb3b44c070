"""The read arbiter: a 32-bit bus, two masters, 2 bursts outstanding."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.bus.arbiter import ReadArbiter
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import OwnerLog

__all__ = ["PROOF", "build_proof"]

_BEATS, _BYTES = 4, 4  # of a burst, of a beat
_OUTSTANDING = 2


def build_proof() -> ProofHarness:
    """Two masters: each burst goes out once and its response goes to its owner; none waits for two of the other."""
    dut = ReadArbiter(2, 8 * _BYTES, max_outstanding=_OUTSTANDING)
    harness = ProofHarness(dut)
    bus = dut.bus
    responds, last = harness.free(1, "rvalid"), harness.free(1, "rlast")
    harness.m.d.comb += [
        bus.arready.eq(harness.free(1, "arready")),
        bus.rvalid.eq(responds),
        bus.rdata.eq(harness.free(32, "rdata")),
        bus.rlast.eq(last),
    ]
    taken = []
    for index, port in enumerate(dut.port):
        asks, burst = harness.free(1, f"asks_{index}"), harness.free(72, f"burst_{index}")
        waits = harness.past(asks & ~port.arready, f"waits_{index}")
        harness.assume(~waits | (asks & (burst == harness.past(burst, f"burst_{index}_past"))))
        harness.m.d.comb += [
            port.arvalid.eq(asks),
            Cat(port.araddr, port.arlen).eq(burst),
            port.rready.eq(harness.free(1, f"rready_{index}")),
        ]
        taken.append((asks & port.arready, burst, waits))
    begun = taken[0][0] | taken[1][0]
    pending = harness.past(begun, "begun") | harness.past(bus.arvalid & ~bus.arready, "bus_waits")
    expected = Signal(72)
    ends = responds & bus.rready & last
    with harness.m.If(begun):
        harness.m.d.sync += expected.eq(Mux(taken[1][0], taken[1][1], taken[0][1]))
    owners = OwnerLog(harness, begun, taken[1][0], ends, _OUTSTANDING, "owner")
    harness.assume(~responds | (owners.count > bus.arvalid))

    harness.prove("one_at_a_time", ~(taken[0][0] & taken[1][0]))
    harness.prove("bus_asks_what_was_taken", bus.arvalid == pending)
    harness.prove("same_burst", ~bus.arvalid | (Cat(bus.araddr, bus.arlen) == expected))
    harness.prove("outstanding_kept", owners.count <= _OUTSTANDING)
    for index, port in enumerate(dut.port):
        harness.prove(f"response_to_owner_{index}", port.rvalid == (responds & owners.waits & (owners.first == index)))
        harness.prove(f"response_same_{index}", (port.rdata == bus.rdata) & (port.rlast == bus.rlast))
        other, passed = taken[1 - index][0], Signal(name=f"passed_{index}")
        harness.m.d.sync += passed.eq(port.arvalid & ~taken[index][0] & (passed | other))
        harness.prove(f"fair_{index}", ~(passed & other))
    harness.prove("waits_for_its_owner", owners.waits | ~bus.rready)
    harness.prove("not_after_reset", ~harness.was_reset | ~bus.arvalid)
    harness.prove("inner_level", harness.probe("owners.level", 2) == owners.count)
    harness.no_paths.append((bus.arready, bus.arvalid))
    harness.cover("two_owners", (owners.count == 2) & (owners.first != owners.second) & ends)
    return harness


PROOF = Proof(build_proof)
