"""The record of a LUN."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.abi.nand import NandTiming
from nearflash.gateware.nand.command_sequencer import CommandKind
from nearflash.gateware.nand.lun_progress import LunProgress
from nearflash.gateware.nand.luns import TRIES_MAX, LunPhase
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof

__all__ = ["PROOF", "build_proof"]

_CLOCK_HZ = 100_000_000
_TIMING = NandTiming(
    read_ns=40, program_ns=50, erase_ns=60, link_bytes_per_s=800_000_000, cache_busy_ns=20, reset_ns=30,
    wb_ns=10, adl_ns=20, whr_ns=10, ccs_ns=40, rhw_ns=30,
)  # fmt: skip


def build_proof() -> ProofHarness:
    """One LUN's record from its reset on, in any order of what the controller does: no command while it is busy.

    The LUN is busy after a command for as long as it likes, and reports it by its status.
    """
    dut = LunProgress(_TIMING, _CLOCK_HZ)
    harness = ProofHarness(dut)
    m = harness.m
    record, busy, loaded = Signal(dut.record.shape()), Signal(), Signal()
    phase = record.phase
    serves, read_out, chains = (harness.free(1, name) for name in ("serves", "read_out", "chains"))
    status = Cat(harness.free(6, "status_low"), ~busy, 1)
    turns = chains & (phase == LunPhase.SENSE) & ~busy  # 31h right after the status that found the page
    m.d.comb += [
        dut.record.eq(record),
        *(getattr(dut, name).eq(harness.free(1, name)) for name in ("due", "operation", "erase", "more", "jobs")),
        dut.now.eq(harness.free(dut.time_bits, "now")),
        dut.kind.eq(Mux(turns, CommandKind.CACHE_READ, dut.choice)),
        dut.status.eq(status),
    ]
    acts = serves & (phase != LunPhase.READY)
    issues = acts & (dut.kind != CommandKind.STATUS)
    m.d.sync += busy.eq(busy & harness.free(1, "stays_busy"))
    with m.If(acts):
        m.d.sync += record.eq(dut.new)
    with m.Elif(read_out & (phase == LunPhase.READY)):
        m.d.sync += phase.eq(Mux(record.behind, LunPhase.CHAIN, LunPhase.IDLE))
    with m.If(issues):
        reads = (dut.kind == CommandKind.READ) | (dut.kind == CommandKind.CACHE_READ)
        m.d.sync += [busy.eq(1), loaded.eq(reads | (dut.kind == CommandKind.CACHE_END))]
    harness.prove("no_command_to_a_busy_lun", ~issues | ~busy | (dut.kind == CommandKind.RESET))
    waits = Cat(phase == one for one in (LunPhase.IDLE, LunPhase.READY, LunPhase.CHAIN)).any()
    harness.prove("busy_only_in_busy_phases", ~waits | ~busy)
    senses = (phase == LunPhase.SENSE) | (phase == LunPhase.TURN)
    harness.prove("sensing_gives_a_page", ~senses | loaded)
    harness.prove("a_page_to_read_out", (phase != LunPhase.READY) | (loaded & ~busy))
    harness.prove("one_arrival_a_page", ~(acts & dut.arrives) | (dut.new.phase == LunPhase.READY) | dut.new.failed)
    harness.prove("late_is_last", ~(acts & dut.late) | (busy & (record.tries == TRIES_MAX)))
    harness.cover("chain", acts & (phase == LunPhase.CHAIN) & (dut.kind == CommandKind.CACHE_READ))
    harness.cover("erased", acts & dut.ends & record.behind)
    return harness


PROOF = Proof(build_proof, engine="induction", depth=3)
