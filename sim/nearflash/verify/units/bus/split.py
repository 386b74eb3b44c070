"""The burst splitter: a 32-bit bus, bursts of up to 4 beats."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.bus.split import BurstSplitter
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "build_proof"]

_BEATS, _BYTES = 4, 4  # of a burst, of a beat


def build_proof() -> ProofHarness:
    """The bursts of a command continue each other, stay inside a block, and add up to the command."""
    dut = BurstSplitter(8 * _BYTES, _BEATS * _BYTES)
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    burst = dut.o.payload
    left, address = Signal(32), Signal(64)  # beats and place that the command still wants
    fresh = dut.o.valid & ~harness.past(dut.o.valid & ~dut.o.ready, "waited")
    beats = Mux(fresh, burst.length + 1, 0)
    harness.m.d.sync += [left.eq(left - beats), address.eq(address + beats * _BYTES)]
    with harness.m.If(moves(dut.i)):
        harness.m.d.sync += [left.eq(dut.i.payload.beats), address.eq(dut.i.payload.address & ~(_BYTES - 1))]

    harness.prove("bursts_continue_each_other", ~fresh | (burst.address == address))
    harness.prove("burst_within_command", beats <= left)
    harness.prove("burst_within_block", ~dut.o.valid | (burst.address[2:4] + burst.length < _BEATS))
    harness.prove("next_command_after_the_last_beat", ~dut.i.ready | (beats == left))
    harness.prove("idle_means_nothing_left", ~dut.idle | ((left == 0) & ~dut.o.valid))
    was_done = harness.past((left == 0) & ~dut.o.valid & ~moves(dut.i), "was_done")
    harness.prove("idle_soon_after_the_end", ~was_done | ~harness.past(was_done, "long_done") | dut.idle)
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    harness.cover("three_bursts", fresh & (left == 1) & (burst.address[:8] == 0x20))

    inner_left = harness.probe("left_beats", 32)
    block, offset = harness.probe("block", 60), harness.probe("offset", 2)
    changed, some = harness.probe("changed", 1), harness.probe("some", 1)
    harness.prove("inner_some", changed | (some == (inner_left != 0)))
    harness.prove("inner_alignment", address[:2] == 0)
    harness.prove("inner_left", inner_left == left - beats)
    harness.prove("inner_address", (inner_left == 0) | (Cat(offset, block) == (address + beats * _BYTES)[2:64]))
    return harness


PROOF = Proof(build_proof, engine="induction", depth=3)
