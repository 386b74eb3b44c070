"""NAND controller of one channel: page requests to the raw codewords that they name, programs and erases beside them.

    i ─► RequestTable ─► JobQueues ─┐                ┌─► header
             │  ▲ ready             ▼                │
             ▼  │                LunTable ─► sequencer ─► CommandSequencer ─► link.cycles
          RunFinder ───────────────────────────────► Delivery ◄─ link.read ;  codewords ◄─ Delivery

Contract: each request gives one header, then the codewords of its mask, ascending and together; requests come in any
order: the first one whose pages are in their registers goes first. Only those codewords cross the link: each run of
neighbours takes one column change. The pages of all luns are sensed at the same time; with `cached`, a lun senses its
next page while the one before is read out. Programs and erases run on their lun while the others are read; each gives
one result. A program's data are asked for by `due`, while the bus is held for them; one that cannot begin asks for
none. Every wait of NandTiming is kept; other luns are served while a column
change settles. A lun that stays busy far beyond its time is reset, and the codewords of
the page that it owes come as zeros, marked `failed`: nothing waits for it.

Timing: the bus changes hands within 4 clocks. o.valid of `codewords` depends on link.read.valid in the same clock.
Limits: luns are independent: planes that must not be programmed apart are one lun. Rows have 24 bits on the bus.
Source: ONFI 4.2; independent luns as with multi-plane asynchronous reads of current parts.
"""

from dataclasses import dataclass

from amaranth import Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.nand import NandTiming
from nearflash.gateware.nand.command_sequencer import CommandKind, CommandSequencer
from nearflash.gateware.nand.delivery import Delivery
from nearflash.gateware.nand.interfaces import page_header, page_request
from nearflash.gateware.nand.jobs import JobQueues
from nearflash.gateware.nand.link import NandLinkSignature, RawBeat, codeword_beats
from nearflash.gateware.nand.lun_progress import STATUS_FAIL, STATUS_READY, LunProgress
from nearflash.gateware.nand.luns import LunPhase, LunTable
from nearflash.gateware.nand.operation import NUMBER_BITS, NandOperation, NandResult
from nearflash.gateware.nand.requests import RequestTable
from nearflash.gateware.nand.runs import RunFinder
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["NandController"]


@dataclass(frozen=True)
class _Parts:
    table: LunTable
    progress: LunProgress
    requests: RequestTable
    jobs: JobQueues
    sequencer: CommandSequencer
    runs: RunFinder
    delivery: Delivery
    results: StreamQueue


class NandController(wiring.Component):
    """Controller of one channel.

    Parameters
    ----------
    luns : NAND luns, a power of two, 2 to 64. timing : of the part. clock_hz : of this clock.
    tag : shape of the reader's part of a page request; it comes back in the header.
    requests : page requests in flight. unit_requests : of these, for one lun; a power of two.
    cached : use cache reads; of use where the luns are too few to cover tR.
    shared_enables : luns share chip enables, so nothing may come between a column change and its data.

    Members
    -------
    i : In stream of page_request(tag). header : Out stream of page_header(tag). codewords : Out stream of RawBeat.
    operations : In stream of NandOperation. program : In stream of 64 bits. results : Out stream of NandResult.
    due : Out, the bus is held for the data of the program at hand.
    link : NandLinkSignature.
    late : Out, pulse: a page or an operation never came to its end; `late_unit` says where.

    Raises
    ------
    ValueError : `luns` outside its range.
    """

    def __init__(
        self,
        luns: int,
        timing: NandTiming,
        clock_hz: int,
        *,
        tag: ShapeLike,
        requests: int = 32,
        unit_requests: int = 8,
        cached: bool = False,
        shared_enables: bool = False,
    ) -> None:
        if not 2 <= luns <= 64 or luns & (luns - 1):
            raise ValueError(f"luns must be a power of two, 2 to 64, not {luns!r}")
        self.luns, self.timing, self.clock_hz = luns, timing, clock_hz
        self.tag = tag
        self.requests, self.unit_requests, self.cached = requests, unit_requests, cached
        self.shared_enables = shared_enables
        super().__init__(
            {
                "i": In(stream.Signature(page_request(tag))),
                "header": Out(stream.Signature(page_header(tag))),
                "codewords": Out(stream.Signature(RawBeat)),
                "operations": In(stream.Signature(NandOperation)),
                "program": In(stream.Signature(64)),
                "due": Out(1),
                "results": Out(stream.Signature(NandResult)),
                "link": Out(NandLinkSignature),
                "late": Out(1),
                "late_unit": Out(8),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The parts, what connects them, and the sequencer, which owns the bus."""
        m = Module()
        progress = LunProgress(self.timing, self.clock_hz, shared_enables=self.shared_enables)
        parts = _Parts(
            LunTable(self.luns, progress.time_bits),
            progress,
            RequestTable(self.luns, self.requests, self.tag),
            JobQueues(self.luns, self.unit_requests, (self.requests - 1).bit_length()),
            CommandSequencer(self.timing, self.clock_hz),
            RunFinder(),
            Delivery(),
            StreamQueue(NandResult, self.luns),
        )
        for name, part in vars(parts).items():
            m.submodules[name] = part
        self._connect(m, parts)

        slot, kind = Signal(range(self.requests)), Signal(CommandKind)  # the request read out; the command played
        reading, final = Signal(), Signal()  # between column and data; the request is through
        m.d.comb += [parts.requests.slot.eq(slot), parts.sequencer.i.payload.kind.eq(kind)]
        with m.FSM():
            with m.State("DECIDE"):
                m.d.comb += [parts.table.peek.eq(parts.table.found), parts.table.peek_unit.eq(parts.table.found_unit)]
                with m.If(parts.table.found):
                    m.next = "CHOOSE"
                with m.Elif(parts.requests.ready.valid):
                    m.d.comb += parts.requests.ready.ready.eq(1)
                    m.d.sync += slot.eq(parts.requests.ready.payload)
                    m.next = "OPEN"
            self._serve(m, parts, kind, reading)
            self._transfer(m, parts, kind, reading, final)
        return m

    def _connect(self, m: Module, parts: _Parts) -> None:
        table, requests, jobs = parts.table, parts.requests, parts.jobs
        operation = self.operations
        for inner, outer in (
            (requests.i, wiring.flipped(self.i)),
            (requests.jobs, jobs.i),
            (parts.sequencer.o, wiring.flipped(self.link.cycles)),
            (parts.delivery.o, wiring.flipped(self.codewords)),
            (parts.results.o, wiring.flipped(self.results)),
            (wiring.flipped(self.program), wiring.flipped(self.link.write)),
        ):
            wiring.connect(m, inner, outer)
        m.d.comb += [
            jobs.lun.eq(table.lun),
            table.jobs.eq(jobs.some),
            table.operation.eq(operation.valid & (operation.payload.lun[: len(table.lun)] == table.lun)),
            parts.delivery.read.payload.eq(self.link.read.payload),
            parts.runs.i.payload.codewords.eq(requests.entry.header.codewords),
            parts.runs.i.payload.page_log2.eq(requests.entry.page_log2),
            self.header.payload.eq(requests.entry.header),
            self.late_unit.eq(table.found_unit),
        ]

    def _serve(self, m: Module, parts: _Parts, kind: Signal, reading: Signal) -> None:
        """States that give the lun that was found what it wants, and write its new record."""
        table, sequencer, jobs = parts.table, parts.sequencer, parts.jobs
        operation = self.operations.payload
        # The LUN's first request, and the one whose page it reads.
        job, sensed = Signal(range(self.requests)), Signal(range(self.requests))
        some, more, owed = Signal(), Signal(), Signal()  # jobs; an operation
        status, unbegun = Signal(8), Signal()  # unbegun: the lun cannot be reset, so its operation fails
        phase = table.found_record.phase
        progress = parts.progress
        m.d.sync += self.late.eq(0)
        m.d.comb += [
            progress.more.eq(jobs.more),
            progress.jobs.eq(some),
            progress.kind.eq(kind),
            progress.status.eq(status),
            unbegun.eq(progress.late & owed & (phase == LunPhase.RESET)),
        ]
        self._describe(m, parts, status, unbegun)
        with m.State("CHOOSE"):
            m.d.comb += [table.peek.eq(1), table.peek_unit.eq(table.found_unit)]
            m.d.sync += [job.eq(jobs.first), sensed.eq(Mux(phase == LunPhase.IDLE, jobs.first, jobs.next))]
            m.d.sync += [
                some.eq(jobs.some),
                more.eq(jobs.more & ~table.operation & self.cached),
                owed.eq(table.operation),
            ]
            m.d.sync += kind.eq(progress.choice)
            m.next = "PLAY"
        with m.State("PLAY"):
            works = (kind == CommandKind.PROGRAM) | (kind == CommandKind.ERASE)
            m.d.comb += [
                parts.requests.slot.eq(sensed),
                sequencer.i.valid.eq(1),
                sequencer.i.payload.lun.eq(table.found_unit),
                sequencer.i.payload.row.eq(Mux(works, operation.row, parts.requests.entry.row)),
                sequencer.i.payload.beats.eq(Mux(works, codeword_beats(operation.codewords), 1)),
                self.link.read.ready.eq(kind == progress.status_kind),
                self.due.eq(kind == CommandKind.PROGRAM),
            ]
            with m.If(self.link.read.valid):
                m.d.sync += status.eq(self.link.read.payload)
            with m.If(sequencer.i.ready):
                m.next = "SETTLE"
                with m.If((kind == progress.status_kind) & (phase == LunPhase.SENSE) & status[STATUS_READY] & more):
                    m.d.sync += kind.eq(CommandKind.CACHE_READ)
                    m.next = "PLAY"
        self._settle(m, parts, job, reading, owed & ((phase == LunPhase.IDLE) | unbegun), unbegun)

    def _settle(self, m: Module, parts: _Parts, job: Signal, reading: Signal, taken: Value, unbegun: Signal) -> None:
        """The state that writes a LUN's new record; `taken`: its operation leaves the queue."""
        table, progress, result = parts.table, parts.progress, parts.results.i
        with m.State("SETTLE"):
            m.d.comb += [
                table.update.eq(1),
                parts.requests.slot.eq(job),
                self.operations.ready.eq(taken),
            ]
            m.d.comb += [
                table.new.eq(progress.new),
                parts.requests.arrive.eq(progress.arrives),
                result.valid.eq(progress.ends | unbegun),
                result.payload.erase.eq(Mux(progress.ends, table.found_record.behind, self.operations.payload.erase)),
            ]
            m.d.sync += self.late.eq(progress.late)
            m.next = "DECIDE"
            with m.If(reading):
                m.next = "SETTLE-COLUMN"

    def _describe(self, m: Module, parts: _Parts, status: Signal, unbegun: Signal) -> None:
        """The found LUN's record to its progress; what its operation came to, for the case that it ends."""
        table, progress, result = parts.table, parts.progress, parts.results.i.payload
        operation, number = self.operations.payload, self._numbers(m, table.found_unit)
        m.d.comb += [
            progress.record.eq(table.found_record),
            progress.due.eq(table.due),
            progress.now.eq(table.now),
            progress.operation.eq(table.operation),
            progress.erase.eq(operation.erase),
            result.lun.eq(table.found_unit),
            result.number.eq(Mux(unbegun, operation.number, number)),
            result.failed.eq(~progress.late & status[STATUS_FAIL]),
            result.timeout.eq(progress.late),
        ]

    def _numbers(self, m: Module, lun: Value) -> Value:
        """The number of the operation that `lun` works on."""
        m.submodules.numbers = numbers = Memory(shape=NUMBER_BITS, depth=self.luns, init=[])
        write, read = numbers.write_port(), numbers.read_port(domain="comb")
        m.d.comb += [
            write.addr.eq(lun),
            write.data.eq(self.operations.payload.number),
            write.en.eq(self.operations.valid & self.operations.ready),
            read.addr.eq(lun),
        ]
        return read.data

    def _transfer(self, m: Module, parts: _Parts, kind: Signal, reading: Signal, final: Signal) -> None:
        """States that read out one request, run after run."""
        table, runs, delivery = parts.table, parts.runs, parts.delivery
        run, entry = runs.o.payload, parts.requests.entry
        lun, opened = Signal(range(self.luns)), Signal()  # whose page is being read out
        command = parts.sequencer.i.payload
        m.d.comb += [
            table.peek_unit.eq(lun),
            command.lun.eq(lun),
            command.row.eq(entry.row),
            command.column.eq(codeword_beats(run.place) << 3),
            command.beats.eq(codeword_beats(run.count)),
            delivery.i.payload.run.eq(run),
            delivery.i.payload.lun.eq(lun),
            delivery.i.payload.row.eq(entry.row),
            delivery.i.payload.failed.eq(table.record.failed),
        ]
        with m.State("OPEN"):
            m.d.comb += self.header.valid.eq(delivery.i.ready)  # behind the codewords of the request before
            with m.If(self.header.valid & self.header.ready):
                m.next = "MASK"
        with m.State("MASK"):
            m.d.comb += runs.i.valid.eq(1)
            with m.If(runs.i.ready):
                m.next = "RUN"
        with m.State("RUN"):
            with m.If(runs.o.valid & opened & run.fresh):  # the first page is through
                m.next = "CLOSE"
            with m.Elif(runs.o.valid):
                m.d.sync += [lun.eq(entry.lun ^ run.second), opened.eq(1)]
                m.next = "SEND"
        with m.State("SEND"):
            m.d.comb += [table.peek.eq(1), delivery.i.valid.eq(1)]
            m.d.sync += kind.eq(Mux(run.fresh, CommandKind.SELECT, CommandKind.COLUMN))
            with m.If(delivery.i.ready):
                m.next = "COLUMN"
                with m.If(table.record.failed):
                    m.next = "NEXT"
        self._read_run(m, parts, kind, reading)
        self._end_run(m, parts, opened, final)

    def _read_run(self, m: Module, parts: _Parts, kind: Signal, reading: Signal) -> None:
        """States of one run: its column change, and its data once that has settled."""
        table, delivery = parts.table, parts.delivery
        with m.State("COLUMN"):
            m.d.comb += parts.sequencer.i.valid.eq(1)
            with m.If(parts.sequencer.i.ready):
                m.next = "SETTLE-COLUMN"
        with m.State("SETTLE-COLUMN"):  # the bus is free meanwhile
            m.d.comb += [table.peek.eq(table.found), table.peek_unit.eq(table.found_unit)]
            m.d.sync += reading.eq(0)
            with m.If(table.found & (not self.shared_enables)):
                m.d.sync += reading.eq(1)
                m.next = "CHOOSE"
            with m.Elif(parts.sequencer.settled | self.shared_enables):
                m.d.sync += kind.eq(CommandKind.DATA)
                m.next = "DATA"
        with m.State("DATA"):
            m.d.comb += [
                parts.sequencer.i.valid.eq(1),
                delivery.read.valid.eq(self.link.read.valid),
                self.link.read.ready.eq(delivery.read.ready),
            ]
            with m.If(parts.sequencer.i.ready):
                m.next = "NEXT"

    def _end_run(self, m: Module, parts: _Parts, opened: Signal, final: Signal) -> None:
        """States after a run: the next one, or the end of the page, which leaves its LUN's register."""
        table, requests, runs = parts.table, parts.requests, parts.runs
        run = runs.o.payload
        with m.State("NEXT"):
            m.d.comb += runs.o.ready.eq(1)
            m.d.sync += final.eq(run.last)
            m.next = "RUN"
            with m.If(run.last):
                m.next = "CLOSE"
        with m.State("CLOSE"):
            m.d.comb += [table.peek.eq(1), table.change.eq(1), parts.jobs.pop.eq(1)]
            m.d.comb += [table.new.eq(table.record), table.new.failed.eq(0), requests.release.eq(final)]
            with m.If(table.record.phase == LunPhase.READY):
                m.d.comb += table.new.phase.eq(Mux(table.record.behind, LunPhase.CHAIN, LunPhase.IDLE))
            m.d.sync += [opened.eq(0), final.eq(0)]
            m.next = "RUN"
            with m.If(final):
                m.next = "DECIDE"
