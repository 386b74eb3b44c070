"""The command sequencer, with times of a few clocks."""

from typing import Any

from amaranth.hdl import Signal

from nearflash.abi.nand import NandTiming
from nearflash.gateware.nand.command_sequencer import CommandKind, CommandSequencer
from nearflash.gateware.nand.link import CycleKind
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "build_proof"]

_CLOCK_HZ = 100_000_000
_TIMING = NandTiming(
    read_ns=40, program_ns=50, erase_ns=60, link_bytes_per_s=800_000_000, cache_busy_ns=20, reset_ns=30,
    wb_ns=10, adl_ns=20, whr_ns=10, ccs_ns=40, rhw_ns=30,
)  # fmt: skip


def _since(harness: ProofHarness, event: Any, clocks: int, name: str) -> Any:
    """Whether `clocks` clocks have passed since the last `event`."""
    left = Signal(range(clocks + 1), name=f"{name}_left")
    with harness.m.If(event):
        harness.m.d.sync += left.eq(clocks)
    with harness.m.Elif(left != 0):
        harness.m.d.sync += left.eq(left - 1)
    return left == 0


def build_proof() -> ProofHarness:
    """Whatever comes after whatever: each wait is kept."""
    dut = CommandSequencer(_TIMING, _CLOCK_HZ)
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    cycle, given = dut.o.payload, dut.i.payload
    harness.assume(given.kind.as_value() < len(CommandKind))
    command, reads = cycle.kind == CycleKind.COMMAND, cycle.kind == CycleKind.READ
    status = (given.kind == CommandKind.STATUS) | (given.kind == CommandKind.STATUS_OF_ROW)
    ends = moves(dut.o) & command
    rhw = _since(harness, moves(dut.o) & reads, 3, "rhw")
    ccs = _since(harness, ends & (cycle.byte == 0xE0), 4, "ccs")
    whr = _since(harness, moves(dut.o) & status & ~reads, 1, "whr")
    adl = _since(
        harness, moves(dut.o) & (given.kind == CommandKind.PROGRAM) & (cycle.kind == CycleKind.ADDRESS), 2, "adl"
    )
    harness.prove("command_after_rhw", ~(dut.o.valid & command) | rhw)
    harness.prove("data_after_ccs", ~(dut.o.valid & reads & ~status) | ccs)
    harness.prove("status_after_whr", ~(dut.o.valid & reads & status) | whr)
    harness.prove("data_in_after_adl", ~(dut.o.valid & (cycle.kind == CycleKind.WRITE)) | adl)
    harness.prove("one_lun_a_sequence", ~dut.o.valid | (cycle.lun == given.lun))
    harness.cover("program_closes", moves(dut.i) & (given.kind == CommandKind.PROGRAM))
    harness.cover("read_and_status", moves(dut.i) & (given.kind == CommandKind.STATUS) & harness.past(rhw, "rested"))
    return harness


PROOF = Proof(build_proof)
