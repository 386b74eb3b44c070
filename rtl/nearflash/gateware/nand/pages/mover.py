"""Page mover: page operations of a batch, from their records to their completions.

    i ─► record ─┬─► operation (o_request: reads) ─► NandController ─┬─► result ─► completion
                 └─► (bad) completion                                └─► page wanted ─► record again, its page ─┐
    memory ◄───────────────────────────────────────────────────────────────────────────── PageTransfer ◄────────┘

One thing after the other, of those that can go: a completion first, then a page that its channel waits for, then the
next record. So records are fetched while luns work, and a page moves when its lun is ready for it, not before.

Contract: one completion a record; operations of one lun in their order. A read waits until every program and erase
before it has ended, and the other way round; a channel whose queue is full keeps the records behind waiting. Records
must not change until their completions are there.

Timing: PageTransfer's; beside it about 60 cycles and three times the memory's latency an operation; back-pressure: yes.
Numerics: docs/contracts/attention.md, 5.
Limits: a 64-bit port; pages of all channels move one after the other.
"""

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.page_operation import (
    OPERATION_BYTES,
    OPERATION_COMPLETION_BYTES,
    ROW_BITS,
    OperationKind,
    PageFault,
)
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.bus.axi import Axi4ReadSignature, Axi4WriteSignature
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.bus.write import BurstWriter
from nearflash.gateware.nand.interfaces import CHANNEL_BITS, OperationRead
from nearflash.gateware.nand.operation import NUMBER_BITS
from nearflash.gateware.nand.pages.port import PagePortSignature
from nearflash.gateware.nand.pages.record import OPERATION, codewords_of, is_legal
from nearflash.gateware.nand.pages.router import ChannelPage, PageRouter
from nearflash.gateware.nand.pages.transfer import PageTransfer

__all__ = ["PageMover"]

_BEAT_BYTES = 8
_RECORD_BEATS = OPERATION_BYTES // _BEAT_BYTES
_RECORD_LOG2, _COMPLETION_LOG2 = (size.bit_length() - 1 for size in (OPERATION_BYTES, OPERATION_COMPLETION_BYTES))
_FAULT_BITS = len(PageFault)
_SPOILT = data.StructLayout({"memory": 1, "misdirected": 1})
"""Faults of a program's page, until its lun's result comes."""


class PageMover(wiring.Component):
    """Page operations of all channels.

    Parameters
    ----------
    config : build configuration, with NAND luns; its port must be 64 bits wide.

    Members
    -------
    active : In, a batch of page operations runs. begin : In, pulse ahead of it: forgets `lost`.
    operations_address, completions_address : In, byte addresses of record 0 and completion 0.
    i : In stream of 32 bits: numbers of records, from 0 on. ended : Out, pulse: an operation has ended.
    lost, error : Out, a completion could not be written, and where (BusError).
    busy : Out, an operation has not ended.
    channel : array of Out PagePortSignature, one a channel. o_request : Out stream of OperationRead.
    read_bus : Out Axi4ReadSignature. write_bus : Out Axi4WriteSignature.

    Raises
    ------
    ValueError : the port is not 64 bits wide.
    """

    def __init__(self, config: AttendConfig) -> None:
        if config.port_bits != 8 * _BEAT_BYTES:
            raise ValueError(f"port_bits must be 64, not {config.port_bits!r}")
        self.config = config
        super().__init__(
            {
                "active": In(1),
                "begin": In(1),
                "operations_address": In(64),
                "completions_address": In(64),
                "i": In(stream.Signature(32)),
                "ended": Out(1),
                "lost": Out(1),
                "error": Out(BusError),
                "busy": Out(1),
                "channel": Out(PagePortSignature).array(config.channels),
                "o_request": Out(stream.Signature(OperationRead)),
                "read_bus": Out(Axi4ReadSignature(config.port_bits)),
                "write_bus": Out(Axi4WriteSignature(config.port_bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """LUNs and the operation at hand; then the states: what next, its record, its page, its completion."""
        m = Module()
        m.submodules.reader = self._reader = BurstReader(64, max_outstanding=2, max_burst_bytes=2048)
        m.submodules.writer = self._writer = BurstWriter(64, max_outstanding=2, max_burst_bytes=1024)
        m.submodules.transfer = self._transfer = PageTransfer()
        m.submodules.router = self._router = PageRouter(self.config.channels)
        self._record, self._number, self._faults = Signal(OPERATION), Signal(NUMBER_BITS), Signal(_FAULT_BITS)
        self._page, self._again = Signal(ChannelPage), Signal()  # that is moved; its record is read for the second time
        self._moving, self._completing = Signal(), Signal()  # the next transfer is of a page; of a completion
        self._place = Signal(64)  # byte address of the record or completion, a cycle after its number
        self._kept = Signal()  # its record came; else it moves all the same, for its channel waits
        self._completions = Signal(NUMBER_BITS)  # written
        # The record that could not go when it was fetched, so that it is fetched again when it can.
        self._blocked, self._blocked_read, self._blocked_channel = Signal(), Signal(), Signal(CHANNEL_BITS)
        self._reading = Signal()  # operations that have not ended are reads

        self._connect(m)
        self._give(m)
        spoilt = self._remember(m)
        with m.FSM():
            self._decide(m, spoilt)
            self._load(m)
            self._move(m)
            self._complete(m)
        return m

    def _connect(self, m: Module) -> None:
        """Ports and data paths; a page read and completions share the writer, one after the other."""
        reader, writer, transfer, router = self._reader, self._writer, self._transfer, self._router
        for inner, outer in (
            (reader.bus, wiring.flipped(self.read_bus)), (writer.bus, wiring.flipped(self.write_bus)),
            (transfer.o_nand, router.i_program), (router.o_sealed, transfer.i_nand),
            *((port, wiring.flipped(outer)) for port, outer in zip(router.channel, self.channel, strict=True)),
        ):  # fmt: skip
            wiring.connect(m, inner, outer)
        completion = Cat(self._faults, Const(0, 32 - _FAULT_BITS), Const(1, 1))
        m.d.comb += [
            router.active.eq(self.active),
            router.at.eq(self._page.channel),
            self.busy.eq(self.active & (self.i.payload[:NUMBER_BITS] != self._completions)),
            transfer.i_memory.payload.eq(reader.o.payload),
            transfer.i_memory.valid.eq(reader.o.valid),
            transfer.o_memory.ready.eq(writer.i.ready),
            writer.i.payload.strb.eq(-1),
            writer.i.payload.data.eq(Mux(transfer.o_memory.valid, transfer.o_memory.payload, completion)),
        ]
        table = Mux(self._completing, self.completions_address, self.operations_address)
        offset = Mux(self._completing, self._number << _COMPLETION_LOG2, self._number << _RECORD_LOG2)
        m.d.sync += self._place.eq(table + offset)
        page_beats = (self._page.item.codewords << 6) + (self._page.item.codewords << 1)
        for lun, beats in ((reader, _RECORD_BEATS), (writer, 1)):
            command = lun.i_command.payload
            m.d.comb += [
                command.address.eq(Mux(self._moving, self._record.address, self._place)),
                command.beats.eq(Mux(self._moving, page_beats, beats)),
            ]
        with m.If(self.begin):
            m.d.sync += [self.lost.eq(0), self._completions.eq(0), self._blocked.eq(0)]

    def _give(self, m: Module) -> None:
        """Give the record to its channel and to the transfer of its page."""
        record, operation, request = self._record, self._router.i_operation.payload, self.o_request.payload
        task, page, codewords = self._transfer.task, self._page.item, codewords_of(record)
        m.d.comb += [
            operation.channel.eq(record.channel),
            operation.item.erase.eq(record.kind == OperationKind.ERASE),
            operation.item.lun.eq(record.lun),
            operation.item.row.eq(record.row[:ROW_BITS]),
            operation.item.codewords.eq(codewords),
            operation.item.number.eq(self._number),
            request.channel.eq(record.channel),
            request.number.eq(self._number),
            request.count.eq(codewords),
            request.codewords.eq(Cat((codewords > least).replicate(8) for least in (0, 8, 16, 16))),
            request.row.eq(record.row),
            request.lun.eq(record.lun),
            task.read.eq(page.read),
            task.keep.eq(self._kept),
            task.codewords.eq(page.codewords),
            task.page_tag.page_tag.eq(Cat(record.sequence, record.layer, record.head)),
            task.page_tag.index.eq(record.index),
            task.page_tag.kind.eq(record.page_kind),
            task.second.eq(record.second),
            task.lun.eq(record.lun),
            task.row.eq(record.row),
        ]

    def _remember(self, m: Module) -> data.View:
        """Remember what was wrong with the page that the lun at hand has programmed."""
        m.submodules.spoilt = spoilt = Memory(shape=_SPOILT, depth=self.config.channels * self.config.luns, init=[])
        write, read = spoilt.write_port(), spoilt.read_port(domain="comb")
        for port, item in ((write, self._page), (read, self._router.o_result.payload)):
            m.d.comb += port.addr.eq(Cat(item.item.lun[: self.config.luns.bit_length() - 1], item.channel))
        m.d.comb += [
            write.en.eq(self._transfer.done & ~self._page.item.read),
            write.data.memory.eq(self._reader.error.seen),
            write.data.misdirected.eq(self._transfer.misdirected & self._kept),
        ]
        return read.data

    def _can_go(self, channel: Value, read: Value) -> Value:
        """Whether an operation can be given to its channel now."""
        room = Mux(read, self.o_request.ready, self._router.rooms.bit_select(channel, 1))
        all_ended = self.i.payload[:NUMBER_BITS] == self._completions
        return room & (all_ended | (self._reading == read))

    def _decide(self, m: Module, spoilt: data.View) -> None:
        """The next thing to do."""
        results, pages = self._router.o_result, self._router.o_wanted
        result = results.payload.item
        can_go = ~self._blocked | self._can_go(self._blocked_channel, self._blocked_read)
        with m.State("DECIDE"):
            m.d.comb += [self._reader.clear.eq(1), self._writer.clear.eq(1)]
            with m.If(results.valid):
                m.d.comb += results.ready.eq(1)
                m.d.sync += self._number.eq(result.number)
                self._fail(
                    m,
                    FAILED=result.failed,
                    TIMEOUT=result.timeout,
                    MEMORY=spoilt.memory & ~result.erase,
                    MISDIRECTED=spoilt.misdirected & ~result.erase,
                )
                self._place_of(m, completion=True)
            with m.Elif(pages.valid):
                m.d.comb += pages.ready.eq(1)
                m.d.sync += [self._page.eq(pages.payload), self._number.eq(pages.payload.item.number)]
                m.d.sync += self._again.eq(1)
                self._place_of(m, completion=False)
            with m.Elif(self.active & self.i.valid & can_go):
                m.d.sync += [self._number.eq(self.i.payload), self._again.eq(0)]
                self._place_of(m, completion=False)
        with m.State("PLACE"):  # _place is that of the number from the next cycle on
            m.next = "LOAD"
            with m.If(self._completing):
                m.next = "COMPLETE"

    def _load(self, m: Module) -> None:
        """The record comes; a new one goes to its channel, or ends at once, or has to be fetched again later."""
        reader, record = self._reader, self._record
        beat = Signal(range(_RECORD_BEATS))
        with m.State("LOAD"):
            m.d.comb += reader.i_command.valid.eq(1)
            with m.If(reader.i_command.ready):
                m.next = "AWAIT-RECORD"
        with m.State("AWAIT-RECORD"):
            m.d.comb += reader.o.ready.eq(1)
            with m.If(reader.o.valid):
                m.d.sync += [record.eq(Cat(record, reader.o.payload)[64:]), beat.eq(beat + 1)]
                with m.If(beat == _RECORD_BEATS - 1):
                    m.next = "CHECK-RECORD"
                    with m.If(self._again):
                        m.next = "OPEN"
        with m.State("CHECK-RECORD"):
            read, goes = record.kind == OperationKind.READ, Signal()
            m.d.sync += [self._blocked_channel.eq(record.channel), self._blocked_read.eq(read), self._blocked.eq(0)]
            m.next = "DECIDE"
            with m.If(reader.error.seen | ~is_legal(record, self.config)):
                m.d.comb += self.i.ready.eq(1)
                self._fail(m, MEMORY=reader.error.seen, DESCRIPTOR=~reader.error.seen)
                self._place_of(m, completion=True)
            with m.Elif(self._can_go(record.channel, read)):
                m.d.comb += [self.i.ready.eq(1), goes.eq(1)]
                m.d.sync += self._reading.eq(read)
            with m.Else():
                m.d.sync += self._blocked.eq(1)
            m.d.comb += [self.o_request.valid.eq(goes & read), self._router.i_operation.valid.eq(goes & ~read)]

    def _move(self, m: Module) -> None:
        """A page moves; one whose record was lost goes nowhere."""
        reader, writer, transfer, page = self._reader, self._writer, self._transfer, self._page.item
        with m.State("OPEN"):
            m.d.sync += self._kept.eq(~reader.error.seen)
            m.next = "COMMAND"
        with m.State("COMMAND"):
            m.d.comb += [
                self._moving.eq(1),
                reader.i_command.valid.eq(self._kept & ~page.read),
                writer.i_command.valid.eq(self._kept & page.read),
            ]
            with m.If(~self._kept | Mux(page.read, writer.i_command.ready, reader.i_command.ready)):
                m.d.comb += transfer.start.eq(1)
                m.next = "MOVE"
        with m.State("MOVE"):
            m.d.comb += [reader.o.ready.eq(transfer.i_memory.ready), writer.i.valid.eq(transfer.o_memory.valid)]
            with m.If(transfer.done):
                m.next = "CLOSE"
        with m.State("CLOSE"):
            self._fail(
                m,
                MEMORY=reader.error.seen | writer.error.seen,
                UNCORRECTABLE=transfer.uncorrectable,
                MISDIRECTED=transfer.misdirected & self._kept,
            )
            with m.If(~page.read):  # its lun has yet to say how it went
                m.next = "DECIDE"
            with m.Elif(writer.idle):
                self._place_of(m, completion=True)

    def _complete(self, m: Module) -> None:
        """A completion is written, and answered before the next one."""
        writer = self._writer
        with m.State("COMPLETE"):
            m.d.comb += [writer.clear.eq(1), writer.i_command.valid.eq(1)]
            with m.If(writer.i_command.ready):
                m.next = "WRITE"
        with m.State("WRITE"):
            m.d.comb += writer.i.valid.eq(1)
            with m.If(writer.i.ready):
                m.next = "AWAIT-RESPONSE"
        with m.State("AWAIT-RESPONSE"):
            with m.If(writer.idle):
                m.d.comb += self.ended.eq(1)
                m.d.sync += self._completions.eq(self._completions + 1)
                with m.If(writer.error.seen & ~self.lost):
                    m.d.sync += [self.lost.eq(1), self.error.eq(writer.error)]
                m.next = "DECIDE"

    def _place_of(self, m: Module, *, completion: bool) -> None:
        """The next states, which begin with an address: the operation's completion, or its record."""
        m.d.sync += self._completing.eq(completion)
        m.next = "PLACE"

    def _fail(self, m: Module, **bits: Value) -> None:
        """The faults of the operation at hand."""
        m.d.sync += self._faults.eq(Cat(bits.get(str(fault.name), Const(0, 1)) for fault in PageFault))
