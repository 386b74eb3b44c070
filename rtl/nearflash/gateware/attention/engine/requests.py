"""Requests inside an engine: a record and the faults of each ticket.

Contract: a request is taken when its ticket is free, and frees it when its END has passed the lanes: GATHER requests
then give their Done, the others an EndedRequest. Tickets go out round robin, so a request may wait for an older one.

Timing: o_done or o_ended 2 cycles after the END; back-pressure: yes.
"""

from amaranth import Array, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.beats import TICKET_BITS, TICKETS, EndedRequest, TicketFault, TicketRecord
from nearflash.gateware.attention.engine.interfaces import FAULT_BITS, SLOT_BITS, Done, GatherWrite, RequestKind
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["TicketTable"]


class TicketTable(wiring.Component):
    """Records by ticket.

    Parameters: contexts; readers, lookups of records; reporters, sources of faults.
    Members
    -------
    i_gather : In, {valid, write}: broadcast.
    i : In stream of TicketRecord; its slot is filled in here.
    ticket : In, array of tickets; record : Out, TicketRecord of each, combinational.
    fault : In, array of TicketFault. end : In, {valid, ticket}.
    o_done : Out stream of Done. o_ended : Out stream of EndedRequest.
    """

    def __init__(self, contexts: int, readers: int, reporters: int) -> None:
        self._contexts, self._readers = contexts, readers
        super().__init__(
            {
                "i_gather": In(data.StructLayout({"valid": 1, "write": GatherWrite})),
                "i": In(stream.Signature(TicketRecord)),
                "ticket": In(TICKET_BITS).array(readers),
                "record": Out(TicketRecord).array(readers),
                "fault": In(TicketFault).array(reporters),
                "end": In(data.StructLayout({"valid": 1, "ticket": TICKET_BITS})),
                "o_done": Out(stream.Signature(Done)),
                "o_ended": Out(stream.Signature(EndedRequest)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Take requests; collect faults; end requests one by one."""
        m = Module()
        m.submodules.slots = slots = Memory(shape=SLOT_BITS, depth=max(2, self._contexts), init=[])
        m.submodules.ends = ends = StreamQueue(TICKET_BITS, TICKETS)
        new_slot, slot = slots.write_port(), slots.read_port(domain="comb")
        taken, new, begin = Signal(TICKETS), Signal(TicketRecord), Signal()
        ticket, i = self.i.payload.request.ticket, self.i.payload
        m.d.comb += [
            new_slot.addr.eq(self.i_gather.write.context),
            new_slot.data.eq(self.i_gather.write.slot),
            new_slot.en.eq(self.i_gather.valid),
            slot.addr.eq(i.request.context),
            # Tickets come in turn; one that is still in use holds the requests back.
            self.i.ready.eq(~taken.bit_select(ticket, 1)),
            new.eq(i),
            new.slot.eq(slot.data),
            begin.eq(self.i.valid & self.i.ready),
            ends.i.payload.eq(self.end.ticket),
            ends.i.valid.eq(self.end.valid),
        ]
        # A memory a reader: each keeps only what is read of it.
        records = []
        for k, reader in enumerate([*self.ticket, ends.o.payload]):
            m.submodules[f"records_{k}"] = memory = Memory(shape=TicketRecord, depth=TICKETS, init=[])
            write, read = memory.write_port(), memory.read_port(domain="comb")
            m.d.comb += [write.addr.eq(ticket), write.data.eq(new), write.en.eq(begin), read.addr.eq(reader)]
            records.append(read.data)
        m.d.comb += [port.eq(record) for port, record in zip(self.record, records, strict=False)]
        faults = self._collect(m, begin, ticket)

        record = records[-1]
        gather = wire(m, record.request.kind == RequestKind.GATHER)
        m.d.comb += [
            self.o_done.payload.context.eq(record.request.context),
            self.o_done.payload.kind.eq(RequestKind.GATHER),
            self.o_done.payload.faults.eq(faults[ends.o.payload]),
            self.o_ended.payload.record.eq(record),
            self.o_ended.payload.faults.eq(faults[ends.o.payload]),
            self.o_done.valid.eq(ends.o.valid & gather),
            self.o_ended.valid.eq(ends.o.valid & ~gather),
            ends.o.ready.eq(Mux(gather, self.o_done.ready, self.o_ended.ready)),
        ]
        with m.If(begin):
            m.d.sync += taken.bit_select(ticket, 1).eq(1)
        # Never the ticket of `begin`: that one is not taken.
        with m.If(ends.o.valid & ends.o.ready):
            m.d.sync += taken.bit_select(ends.o.payload, 1).eq(0)
        return m

    def _collect(self, m: Module, begin: Signal, ticket: Signal) -> Array:
        faults = Array(Signal(FAULT_BITS, name=f"faults_{k}") for k in range(TICKETS))
        for k, collected in enumerate(faults):
            found = [Mux(source.ticket == k, source.faults, 0) for source in self.fault]
            # Faults of several units may come in one cycle, and for one ticket.
            every = collected
            for one in found:
                every = every | one
            m.d.sync += collected.eq(every)
            # The new request wins over faults of the old one, which has ended.
            with m.If(begin & (ticket == k)):
                m.d.sync += collected.eq(0)
        return faults
