"""Finish: drains a head's exact sums from all channels, computes and writes its output, then its completion.

    i_alpha ──► alpha table ──┐
    v_mean (read_bus) ────────┤
                              ▼
    i_partial ─► PartialSum ─► Mix ─► HeadStore (write_bus)
    i_command ─► control ─► completion ──┘
        └► o_drain    └► o_free

Contract: one head at a time, in the order of the commands. All of a head's output waits in the writer's queue until no
fault can come any more but that of its own write: after a fault nothing of it is in memory. The completion is written
after the output was answered, and `o_free` gives the context when the completion was answered.

Timing: one element a cycle while all channels have one; about 150 cycles a head, and the memory's latency four times.
Numerics: those of Mix; REFERENCE_LOW as docs/contracts/attention.md, 1, has it, judged where no other fault than
REFERENCE_HIGH came before.
Limits: a 64-bit port.
"""

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.descriptor import COMPLETION_BYTES
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.fixed_point import REFERENCE_HEADROOM
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.mix import Mix, MixTag
from nearflash.gateware.attention.control.reduce import PartialSum
from nearflash.gateware.attention.control.store import CompletionRecord, HeadStore
from nearflash.gateware.attention.engine.interfaces import (
    CONTEXT_BITS,
    FAULT_BITS,
    HEAD_BITS,
    TOKEN_BITS,
    Alpha,
    DrainCommand,
    FinishCommand,
    GatherWrite,
    Partial,
)
from nearflash.gateware.bus.axi import Axi4ReadSignature, Axi4WriteSignature
from nearflash.gateware.bus.read import BurstReader, ReadEvents
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.bus.write import WriteEvents
from nearflash.gateware.stream.fork import Fork

__all__ = ["Finish"]

_BEAT_BYTES = 8
_HEADS = 1 << HEAD_BITS
_NO_MAXIMUM = -32768
_SHARE = data.StructLayout({"selected": TOKEN_BITS, "numerator": 52, "denominator": 52})


class Finish(wiring.Component):
    """Last unit of a head's way.

    Parameters
    ----------
    config : build configuration; its port must be 64 bits wide.

    Members
    -------
    i_command : In stream of FinishCommand. o_free : Out stream of the context's number; faulty : Out, goes with it.
    i_alpha : In stream of Alpha, always ready. i_gather : In, {valid, write (GatherWrite)}: broadcast.
    o_drain : array of Out streams of DrainCommand, i_partial : array of In streams of Partial; one each a channel.
    completions_address : In, byte address of completion 0.
    read_bus : Out Axi4ReadSignature. write_bus : Out Axi4WriteSignature.
    clear : In, forgets `error`. error : Out BusError, the first of any transfer.
    lost : Out, with `error`: a completion could not be written.
    read_events : Out ReadEvents. write_events : Out WriteEvents. busy : Out, a head is being finished.

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
                "i_command": In(stream.Signature(FinishCommand)),
                "i_alpha": In(stream.Signature(Alpha)),
                "i_gather": In(data.StructLayout({"valid": 1, "write": GatherWrite})),
                "o_drain": Out(stream.Signature(DrainCommand)).array(config.channels),
                "i_partial": In(stream.Signature(Partial)).array(config.channels),
                "o_free": Out(stream.Signature(CONTEXT_BITS)),
                "faulty": Out(1),
                "completions_address": In(64),
                "read_bus": Out(Axi4ReadSignature(config.port_bits)),
                "write_bus": Out(Axi4WriteSignature(config.port_bits)),
                "clear": In(1),
                "error": Out(BusError),
                "lost": Out(1),
                "read_events": Out(ReadEvents),
                "write_events": Out(WriteEvents),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Units, what they hand to each other, then the states of a head."""
        m = Module()
        m.submodules.total = self._total = PartialSum(self.config.channels)
        m.submodules.mix = self._mix = Mix()
        m.submodules.drain = self._drain = Fork(DrainCommand, self.config.channels)
        m.submodules.reader = self._reader = BurstReader(64, max_outstanding=2, max_burst_bytes=1024)
        m.submodules.store = self._store = HeadStore()
        self._command, self._faults = Signal(FinishCommand), Signal(FAULT_BITS)
        # Where the head is: which of its query heads, which element, and whether denominators go through.
        self._head, self._element, self._denominator = Signal(HEAD_BITS), Signal(8), Signal()
        self._weigh, self._settled = Signal(), Signal()
        self._last_head, self._last_element = Signal(HEAD_BITS), Signal(9)  # of the command, a cycle behind it

        self._connect(m)
        loaded = self._read_mean(m)
        share, record = self._read_shares(m), self._record(m)
        self._feed_mix(m, share, record)
        self._judge(m, record)
        self._control(m, loaded)
        return m

    def _connect(self, m: Module) -> None:
        """Ports to units; the first bus error."""
        command, reader, store = self._command, self._reader, self._store
        for inner, outer in ((reader.bus, self.read_bus), (store.bus, self.write_bus)):
            wiring.connect(m, inner, wiring.flipped(outer))
        for channel in range(self.config.channels):
            wiring.connect(m, self._drain.o[channel], wiring.flipped(self.o_drain[channel]))
            wiring.connect(m, wiring.flipped(self.i_partial[channel]), self._total.i[channel])
        m.d.comb += [
            self.read_events.eq(reader.events),
            self.write_events.eq(store.events),
            self.o_free.payload.eq(command.context),
            self.faulty.eq(self._faults != 0),
            *(self._drain.i.payload[name].eq(command[name]) for name in ("slot", "group", "dim_rows")),
            reader.i_command.payload.address.eq(command.v_mean_address),
            reader.i_command.payload.beats.eq(command.dim_rows << 1),
            store.i.eq(self._mix.o),
            store.i_valid.eq(self._mix.o_valid),
            # Of a faulty head nothing is kept: the queue would hold it for the next head's output.
            store.keep.eq(self._faults == 0),
            store.i_output.payload.address.eq(command.out_address),
            store.i_output.payload.beats.eq(command.dim_rows * command.group),
            store.i_completion.payload.address.eq(self.completions_address + command.index * COMPLETION_BYTES),
        ]
        m.d.sync += [self._last_head.eq(command.group - 1), self._last_element.eq((command.dim_rows << 2) - 1)]
        with m.If(self.clear):
            m.d.sync += [self.error.seen.eq(0), self.lost.eq(0)]
        for error in (reader.error, store.error):
            # The first error stays; of two in one cycle it is the store's.
            with m.If(error.seen & ~self.error.seen & ~self.clear):
                m.d.sync += self.error.eq(error)

    def _read_mean(self, m: Module) -> Value:
        """v_mean goes into Mix beat by beat; whether all of it has."""
        address, mean, beat = Signal(8), self._mix.mean, self._reader.o
        m.d.comb += [
            # Mix has room for the whole mean: the bus is never held.
            beat.ready.eq(1),
            mean.valid.eq(beat.valid),
            mean.address.eq(address),
            mean.word.eq(beat.payload),
        ]
        with m.If(self.i_command.ready):
            m.d.sync += address.eq(0)
        with m.Elif(beat.valid):
            m.d.sync += address.eq(address + 1)
        return address == self._command.dim_rows << 1

    def _read_shares(self, m: Module) -> data.View:
        """Alpha items wait in a table by context and head; the entry of `_head` is there a cycle later."""
        alpha, command = self.i_alpha.payload, self._command
        m.submodules.shares = memory = Memory(shape=_SHARE, depth=self.config.contexts * _HEADS, init=[])
        write, read = memory.write_port(), memory.read_port()
        share = Signal(_SHARE)
        m.d.comb += [
            self.i_alpha.ready.eq(1),
            write.addr.eq(Cat(alpha.head, alpha.context)),
            write.en.eq(self.i_alpha.valid),
            read.addr.eq(Cat(self._head, command.context)),
            *(write.data[name].eq(alpha[name]) for name, _ in _SHARE),
            share.eq(read.data),
        ]
        with m.If(~command.weighed):  # dense, or nothing to weigh: alpha is 1
            m.d.comb += [share.selected.eq(command.entries), share.numerator.eq(1), share.denominator.eq(1)]
        return share

    def _record(self, m: Module) -> data.View:
        """The completion, as far as it is known."""
        record, command = Signal(CompletionRecord), self._command
        m.d.comb += self._store.i_completion.payload.record.eq(record)
        m.d.sync += [record.faults.eq(self._faults), record.entries.eq(command.entries), record.pages.eq(command.pages)]
        return record

    def _feed_mix(self, m: Module, share: data.View, record: data.View) -> None:
        """The parts of alpha, then the sums from the channels."""
        total, mix = self._total.o, self._mix
        weigh, tag = Signal(), Signal(MixTag)  # a cycle behind the address of the table
        m.d.sync += [weigh.eq(self._weigh), tag.head.eq(self._head), tag.denominator.eq(self._denominator)]
        m.d.comb += [mix.i_valid.eq(weigh | self._total.o_valid), self._settled.eq(~weigh & ~mix.busy)]
        with m.If(weigh):
            m.d.comb += [
                mix.i.sum.eq(Mux(tag.denominator, share.denominator, share.numerator)),
                mix.i.tag.eq(tag),
                mix.i.tag.share.eq(1),
            ]
            m.d.sync += record.selected.eq(share.selected)
        with m.Else():
            m.d.comb += [
                mix.i.sum.eq(total.sum),
                mix.i.tag.head.eq(self._head),
                mix.i.tag.element.eq(self._element),
                mix.i.tag.denominator.eq(self._denominator),
            ]

    def _judge(self, m: Module, record: data.View) -> None:
        """Maxima go into the completion; REFERENCE_LOW where one lies far below its reference."""
        layout = data.ArrayLayout(signed(12), _HEADS)
        m.submodules.references = memory = Memory(shape=layout, depth=self.config.gather_slots, init=[])
        write, read = memory.write_port(), memory.read_port(domain="comb")
        maximum, faults = self._total.o.maximum, self._command.faults
        low, judged = Signal(), Signal()
        m.d.comb += [
            write.addr.eq(self.i_gather.write.slot),
            write.data.eq(self.i_gather.write.references),
            write.en.eq(self.i_gather.valid),
            read.addr.eq(self._command.slot),
            low.eq(maximum < read.data[self._head] - REFERENCE_HEADROOM),
            # Sums of a head with other faults mean nothing.
            judged.eq((faults & ~Const(Fault.REFERENCE_HIGH, FAULT_BITS)) == 0),
        ]
        with m.If(self.i_command.ready):
            m.d.sync += record.selected.eq(0)
            m.d.sync += [record.maximum[head].eq(_NO_MAXIMUM) for head in range(_HEADS)]
        with m.Elif(self._total.o_valid & self._denominator):
            m.d.sync += record.maximum[self._head].eq(maximum)
            with m.If(low & judged):
                m.d.sync += self._faults.eq(self._faults | Fault.REFERENCE_LOW)

    def _control(self, m: Module, loaded: Value) -> None:
        """The states of a head. Only a head without faults reads v_mean and has an output."""
        command, faults, reader, store = self._command, self._faults, self._reader, self._store
        good = faults == 0
        m.d.comb += self.busy.eq(~self.i_command.ready)
        with m.FSM():
            with m.State("WAIT-COMMAND"):
                m.d.comb += [self.i_command.ready.eq(1), reader.clear.eq(1), store.clear.eq(1)]
                m.d.sync += [command.eq(self.i_command.payload), faults.eq(self.i_command.payload.faults)]
                m.d.sync += [self._head.eq(0), self._element.eq(0), self._denominator.eq(1)]
                with m.If(self.i_command.valid):
                    m.next = "READ-MEAN"
            with m.State("READ-MEAN"):
                m.d.comb += reader.i_command.valid.eq(command.drain & good)
                with m.If(~command.drain):
                    m.next = "COMPLETE"
                with m.Elif(reader.i_command.ready | ~good):
                    m.next = "DRAIN"
            with m.State("DRAIN"):
                m.d.comb += self._drain.i.valid.eq(1)
                with m.If(self._drain.i.ready):
                    m.next = "WEIGH"
            with m.State("WEIGH"):
                m.d.comb += self._weigh.eq(1)
                self._step(m, "SETTLE", elements=False)
            with m.State("SETTLE"):
                with m.If(self._settled & (loaded | ~good)):  # sums must not overtake alpha and mean in Mix
                    with m.If(reader.error.seen):
                        m.d.sync += faults.eq(faults | Fault.MEMORY)
                    m.next = "SUM"
            with m.State("SUM"):
                m.d.comb += self._total.take.eq(1)
                with m.If(self._total.o_valid):
                    self._step(m, "FLUSH", elements=True)
            with m.State("FLUSH"):  # the last output is in the store's queue then
                with m.If(self._settled):
                    m.next = "WRITE-OUTPUT"
            with m.State("WRITE-OUTPUT"):
                m.d.comb += store.i_output.valid.eq(good)
                with m.If(store.i_output.ready | ~good):
                    m.next = "AWAIT-OUTPUT"
            with m.State("AWAIT-OUTPUT"):  # before the completion: a host that sees it reads outputs
                with m.If(store.idle):
                    with m.If(store.error.seen):
                        m.d.sync += faults.eq(faults | Fault.MEMORY)
                    m.next = "COMPLETE"
            with m.State("COMPLETE"):
                m.next = "WRITE-COMPLETION"  # the record is a cycle behind
            with m.State("WRITE-COMPLETION"):
                m.d.comb += [store.i_completion.valid.eq(1), store.clear.eq(1)]  # from here: completion lost
                with m.If(store.i_completion.ready):
                    m.next = "AWAIT-COMPLETION"
            with m.State("AWAIT-COMPLETION"):
                with m.If(store.idle):
                    m.d.sync += self.lost.eq(self.lost | store.error.seen)
                    m.next = "FREE"
            with m.State("FREE"):
                m.d.comb += self.o_free.valid.eq(1)
                with m.If(self.o_free.ready):
                    m.next = "WAIT-COMMAND"

    def _step(self, m: Module, then: str, *, elements: bool) -> None:
        """To the next item: denominators of all heads, then numerators; one a head, or all elements of each."""
        head, element, denominator = self._head, self._element, self._denominator
        last_head = head == self._last_head
        last_element = element == self._last_element if elements else Const(1)
        m.d.sync += element.eq(Mux(denominator | last_element, 0, element + 1))
        with m.If(denominator | last_element):
            m.d.sync += head.eq(Mux(last_head, 0, head + 1))
            with m.If(last_head):
                m.d.sync += denominator.eq(~denominator)
                with m.If(~denominator):
                    m.next = then
