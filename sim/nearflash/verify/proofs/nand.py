"""Benches of the NAND controller's parts, with times of a few clocks."""

from typing import Any

from amaranth.hdl import Cat, Mux, Signal

from nearflash.abi.attention.nand import NandTiming
from nearflash.gateware.nand.bch.encoder import Encoder
from nearflash.gateware.nand.command_sequencer import PhraseKind, PhrasePlayer
from nearflash.gateware.nand.link import CycleKind
from nearflash.gateware.nand.lun_progress import LunProgress
from nearflash.gateware.nand.luns import TRIES_MAX, LunPhase
from nearflash.gateware.nand.runs import RunFinder
from nearflash.gateware.nand.seal_check import SealCheck
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["encoder", "phrase", "progress", "runs", "seal_check"]

_CLOCK_HZ = 100_000_000
_TIMING = NandTiming(
    read_ns=40, program_ns=50, erase_ns=60, link_bytes_per_s=800_000_000, cache_busy_ns=20, reset_ns=30,
    wb_ns=10, adl_ns=20, whr_ns=10, ccs_ns=40, rhw_ns=30,
)  # fmt: skip


def runs() -> Bench:
    """Masks of two pages of up to four codewords: every bit in exactly one run, ascending, as long as can be."""
    dut = RunFinder()
    bench = Bench(dut)
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    mask, run = dut.i.payload.codewords, dut.o.payload
    bench.assume((dut.i.payload.page_log2 <= 2) & (mask[8:] == 0) & (mask != 0))
    bench.assume(Mux(dut.i.payload.page_log2 == 2, 1, mask[4:] == 0))
    bench.assume(Mux(dut.i.payload.page_log2 != 0, 1, mask[2:] == 0))

    left, page_log2 = Signal(8), Signal(2)  # bits of the mask that no run has had
    had = Signal(2)  # pages that had a run
    bits = Signal(8)
    bench.m.d.comb += bits.eq(((1 << run.count[:4]) - 1) << run.number[:3])
    first, end = run.number[:3], Signal(4)
    bench.m.d.comb += end.eq(first + run.count)
    page = Mux(run.second, 1, 0)
    with bench.m.If(moves(dut.i)):
        bench.m.d.sync += [left.eq(mask), page_log2.eq(dut.i.payload.page_log2), had.eq(0)]
    with bench.m.If(moves(dut.o)):
        bench.m.d.sync += [left.eq(left & ~bits), had.bit_select(page, 1).eq(1)]
    bench.prove("each_bit_once", ~dut.o.valid | ((bits & ~left) == 0) & (run.count != 0) & (end <= 8))
    bench.prove("ascending", ~dut.o.valid | ((left & ((1 << first) - 1)) == 0))
    bench.prove("all_bits", ~dut.o.valid | (run.last == ((left & ~bits) == 0)))
    bench.prove("masks_apart", ~moves(dut.i) | (left == 0))
    bench.prove(
        "within_a_page", ~dut.o.valid | ((first >> page_log2) == run.second) & (((end - 1) >> page_log2) == run.second)
    )
    bench.prove("place", ~dut.o.valid | (run.place == (first & ((1 << page_log2) - 1))))
    grows = (left >> end)[0] & ((end >> page_log2) == run.second)
    bench.prove("as_long_as_can_be", ~dut.o.valid | ~grows)
    bench.prove("fresh", ~dut.o.valid | (run.fresh == ~had.bit_select(page, 1)))
    bench.cover("second_page", moves(dut.o) & run.second & run.last & (run.count == 2))
    return bench


def _since(bench: Bench, event: Any, clocks: int, name: str) -> Any:
    """Whether `clocks` clocks have passed since the last `event`."""
    left = Signal(range(clocks + 1), name=f"{name}_left")
    with bench.m.If(event):
        bench.m.d.sync += left.eq(clocks)
    with bench.m.Elif(left != 0):
        bench.m.d.sync += left.eq(left - 1)
    return left == 0


def phrase() -> Bench:
    """Whatever comes after whatever: each wait is kept."""
    dut = PhrasePlayer(_TIMING, _CLOCK_HZ)
    bench = Bench(dut)
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    cycle, given = dut.o.payload, dut.i.payload
    bench.assume(given.kind.as_value() < len(PhraseKind))
    command, reads = cycle.kind == CycleKind.COMMAND, cycle.kind == CycleKind.READ
    status = (given.kind == PhraseKind.STATUS) | (given.kind == PhraseKind.STATUS_OF_ROW)
    ends = moves(dut.o) & command
    rhw = _since(bench, moves(dut.o) & reads, 3, "rhw")
    ccs = _since(bench, ends & (cycle.byte == 0xE0), 4, "ccs")
    whr = _since(bench, moves(dut.o) & status & ~reads, 1, "whr")
    adl = _since(bench, moves(dut.o) & (given.kind == PhraseKind.PROGRAM) & (cycle.kind == CycleKind.ADDRESS), 2, "adl")
    bench.prove("command_after_rhw", ~(dut.o.valid & command) | rhw)
    bench.prove("data_after_ccs", ~(dut.o.valid & reads & ~status) | ccs)
    bench.prove("status_after_whr", ~(dut.o.valid & reads & status) | whr)
    bench.prove("data_in_after_adl", ~(dut.o.valid & (cycle.kind == CycleKind.WRITE)) | adl)
    bench.prove("one_unit_a_phrase", ~dut.o.valid | (cycle.lun == given.lun))
    bench.cover("program_closes", moves(dut.i) & (given.kind == PhraseKind.PROGRAM))
    bench.cover("read_and_status", moves(dut.i) & (given.kind == PhraseKind.STATUS) & bench.past(rhw, "rested"))
    return bench


def progress() -> Bench:
    """One lun's record from its reset on, in any order of what the controller does: no command while it is busy.

    The lun is busy after a command for as long as it likes, and tells by its status.
    """
    dut = LunProgress(_TIMING, _CLOCK_HZ)
    bench = Bench(dut)
    m = bench.m
    record, busy, loaded = Signal(dut.record.shape()), Signal(), Signal()
    phase = record.phase
    serves, read_out, chains = (bench.free(1, name) for name in ("serves", "read_out", "chains"))
    status = Cat(bench.free(6, "status_low"), ~busy, 1)
    turns = chains & (phase == LunPhase.SENSE) & ~busy  # 31h right after the status that found the page
    m.d.comb += [
        dut.record.eq(record),
        *(getattr(dut, name).eq(bench.free(1, name)) for name in ("due", "operation", "erase", "more", "jobs")),
        dut.now.eq(bench.free(dut.time_bits, "now")),
        dut.kind.eq(Mux(turns, PhraseKind.CACHE_READ, dut.choice)),
        dut.status.eq(status),
    ]
    acts = serves & (phase != LunPhase.READY)
    says = acts & (dut.kind != PhraseKind.STATUS)
    m.d.sync += busy.eq(busy & bench.free(1, "stays_busy"))
    with m.If(acts):
        m.d.sync += record.eq(dut.new)
    with m.Elif(read_out & (phase == LunPhase.READY)):
        m.d.sync += phase.eq(Mux(record.behind, LunPhase.CHAIN, LunPhase.IDLE))
    with m.If(says):
        reads = (dut.kind == PhraseKind.READ) | (dut.kind == PhraseKind.CACHE_READ)
        m.d.sync += [busy.eq(1), loaded.eq(reads | (dut.kind == PhraseKind.CACHE_END))]
    bench.prove("no_command_to_a_busy_unit", ~says | ~busy | (dut.kind == PhraseKind.RESET))
    waits = Cat(phase == one for one in (LunPhase.IDLE, LunPhase.READY, LunPhase.CHAIN)).any()
    bench.prove("busy_only_in_busy_phases", ~waits | ~busy)
    senses = (phase == LunPhase.SENSE) | (phase == LunPhase.TURN)
    bench.prove("sensing_gives_a_page", ~senses | loaded)
    bench.prove("a_page_to_read_out", (phase != LunPhase.READY) | (loaded & ~busy))
    bench.prove("one_arrival_a_page", ~(acts & dut.arrives) | (dut.new.phase == LunPhase.READY) | dut.new.failed)
    bench.prove("late_is_last", ~(acts & dut.late) | (busy & (record.tries == TRIES_MAX)))
    bench.cover("chain", acts & (phase == LunPhase.CHAIN) & (dut.kind == PhraseKind.CACHE_READ))
    bench.cover("erased", acts & dut.ends & record.behind)
    return bench


def seal_check() -> Bench:
    """Beats pass one for one; an page_tag stays for the 66 beats of its codeword."""
    dut = SealCheck()
    bench = Bench(dut)
    offer(bench, dut.i)
    offer(bench, dut.i_page_tag, "i_page_tag")
    accept(bench, dut.o)
    check_source(bench, dut.o)
    beat = _beats(bench, dut.o, 66)
    bench.prove("one_for_one", moves(dut.i) == moves(dut.o))
    bench.prove("same", ~dut.o.valid | (dut.o.payload.data == dut.i.payload))
    bench.prove("last", ~dut.o.valid | (dut.o.payload.last == (beat == 65)))
    bench.prove("an_owner_a_codeword", moves(dut.i_page_tag) == (moves(dut.o) & dut.o.payload.last))
    bench.cover("second_beat", moves(dut.o) & (beat == 1))
    return bench


def encoder() -> Bench:
    """66 beats in, 69 out; those before the CRC pass unchanged."""
    dut = Encoder()
    bench = Bench(dut)
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    beat = _beats(bench, dut.o, 69)
    bench.prove("taken_as_given", moves(dut.i) == (moves(dut.o) & (beat < 66)))
    bench.prove("same", ~(dut.o.valid & (beat < 65)) | (dut.o.payload.data == dut.i.payload))
    bench.prove("first", ~dut.o.valid | (dut.o.payload.first == (beat == 0)))
    bench.prove("last", ~dut.o.valid | (dut.o.payload.last == (beat == 68)))
    bench.cover("second_beat", moves(dut.o) & (beat == 1))
    return bench


def _beats(bench: Bench, source: Any, count: int) -> Any:
    """Number of the beat that `source` shows in its codeword of `count` beats."""
    beat = Signal(range(count), name="beat")
    with bench.m.If(moves(source)):
        bench.m.d.sync += beat.eq(Mux(beat == count - 1, 0, beat + 1))
    return beat
