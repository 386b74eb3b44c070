"""Benches of the NAND controller and its parts, with times of a few clocks."""

from typing import Any

from amaranth.hdl import Cat, Mux, Signal

from nearflash.abi.attend.nand import NandTiming
from nearflash.gateware.nfc.controller import NandController
from nearflash.gateware.nfc.link import CycleKind
from nearflash.gateware.nfc.phrase import PhraseKind, PhrasePlayer
from nearflash.gateware.nfc.runs import RunFinder
from nearflash.sim.formal.bench import Bench
from nearflash.sim.formal.properties import accept, check_source, moves, offer

__all__ = ["controller", "phrase", "runs"]

_CLOCK_HZ = 100_000_000
_TIMING = NandTiming(
    read_ns=40, program_ns=50, erase_ns=60, link_bytes_per_s=800_000_000, cache_busy_ns=20, reset_ns=30,
    wb_ns=10, adl_ns=20, whr_ns=10, ccs_ns=40, rhw_ns=30,
)  # fmt: skip
_BUSY = (0x30, 0x31, 0x3F, 0x10, 0xD0, 0xFF)
_STATUS = (0x70, 0x78)


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
    bench.prove("one_unit_a_phrase", ~dut.o.valid | (cycle.unit == given.unit))
    bench.cover("program_closes", moves(dut.i) & (given.kind == PhraseKind.PROGRAM))
    bench.cover("read_and_status", moves(dut.i) & (given.kind == PhraseKind.STATUS) & bench.past(rhw, "rested"))
    return bench


def controller() -> Bench:
    """Two units, two requests of up to two pages of two codewords: no command to a busy unit, no data without a page.

    The PHY takes cycles when it likes; a unit is busy for as long as it likes.
    """
    dut = NandController(2, _TIMING, _CLOCK_HZ, requests=2, unit_requests=2, cached=True)
    bench = Bench(dut)
    m, link, cycle = bench.m, dut.link, dut.link.cycles.payload
    for name in ("i", "operations", "program"):
        offer(bench, getattr(dut, name), name)
    for name in ("header", "codewords", "results"):
        accept(bench, getattr(dut, name), name)
    accept(bench, link.cycles, "cycles")
    m.d.comb += [dut.context.page_codewords.eq(2), dut.context_valid.eq(1)]
    bench.assume((dut.i.payload.codewords < 16) & (dut.i.payload.codewords != 0) & (dut.i.payload.context == 0))
    bench.assume(~(bench.was_reset & dut.i.valid))

    at = cycle.unit[0]
    busy, loaded, telling = Signal(2), Signal(2), Signal(2)  # by unit; telling: data out is the status
    command, reads = cycle.kind == CycleKind.COMMAND, cycle.kind == CycleKind.READ
    ends = moves(link.cycles)
    is_status = Cat(cycle.byte == byte for byte in _STATUS).any()
    status = telling.bit_select(at, 1)
    had = Signal()  # this data cycle gave a beat
    m.d.comb += [
        link.read.valid.eq(bench.free(1, "read_valid") & link.cycles.valid & reads & ~(status & had)),
        link.read.payload.eq(Mux(status, Mux(busy.bit_select(at, 1), 0, 0x40), 0)),
        link.write.ready.eq(bench.free(1, "write_ready")),
    ]
    m.d.sync += had.eq((had | moves(link.read)) & ~ends)
    bench.assume(~(ends & reads) | had)
    m.d.sync += busy.eq(busy & bench.free(2, "stay_busy"))
    with m.If(ends & command):
        with m.If(Cat(cycle.byte == byte for byte in _BUSY).any()):
            m.d.sync += busy.bit_select(at, 1).eq(1)
        with m.If(Cat(cycle.byte == byte for byte in (0x30, 0x31)).any()):
            m.d.sync += loaded.bit_select(at, 1).eq(1)
        with m.If(Cat(cycle.byte == byte for byte in (0x10, 0xD0, 0xFF)).any()):
            m.d.sync += loaded.bit_select(at, 1).eq(0)
        with m.If(is_status | (cycle.byte == 0xE0)):
            m.d.sync += telling.bit_select(at, 1).eq(is_status)

    idle = ~busy.bit_select(at, 1)
    bench.prove("no_command_to_a_busy_unit", ~(link.cycles.valid & command) | is_status | (cycle.byte == 0xFF) | idle)
    bench.prove("no_data_without_a_page", ~(link.cycles.valid & reads) | status | idle & loaded.bit_select(at, 1))
    open_requests = Signal(3)
    m.d.sync += open_requests.eq(open_requests + moves(dut.i) - moves(dut.header))
    bench.prove("headers_have_requests", ~dut.header.valid | (open_requests != 0))
    bench.prove("requests_in_slots", open_requests <= 2)
    return bench
