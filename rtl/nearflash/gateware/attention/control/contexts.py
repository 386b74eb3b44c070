"""Context table: where each head in flight stands, and what it does next.

    plan ─► SCAN ──all blocks and tail groups done──► GATHER ──all groups done, all alphas in──► FINISH ─► free
             │  (select command)                       ▲  │
             └──────── faults ────────────► FINISH     └─ dense heads begin here

Contract: a phase ends when its walkers have ended and as many items of Done have come as they announced, in any order.
Faults of all units are collected; a head that has some when its scan ends goes straight to FINISH. A finish command
leaves when nothing of the head is under way; context and slot are free once Finish has given the context back.
Where fewer contexts are in use than the build has, each has a larger share of the rows, and takes as many slots behind
its own: slots are given out in such steps.
`memory_error` is a sticky flag of the bus: heads that finish while it is set have fault MEMORY.

Watchdog: when contexts are in SCAN or GATHER and nothing happens for `watchdog` cycles (0: never), every head that is
not in FINISH yet is finished with fault WATCHDOG, without a drain, and so is every head of the batch that comes after.
What still comes for them is dropped. The kernel needs a reset before its next batch (`expired` stays until `start`).

Timing: 3 cycles an event; back-pressure: yes, but no output holds an event back: there is room for all contexts.
"""

from typing import Any

from amaranth import C, Module, Mux, Signal
from amaranth.hdl import signed
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.free_list import FreeList
from nearflash.gateware.attention.control.interfaces import BlockCredit, HeadPlan, WalkEnd
from nearflash.gateware.attention.engine.interfaces import (
    CONTEXT_BITS,
    FAULT_BITS,
    SLOT_BITS,
    Alpha,
    Done,
    FinishCommand,
    RequestKind,
    SelectCommand,
)
from nearflash.gateware.stream.half import HalfBuffer
from nearflash.gateware.stream.merge import Merge
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["ContextTable", "Phase", "PhaseCounts"]


class Phase(enum.Enum, shape=2):
    """Phase of a head."""

    IDLE = 0
    SCAN = 1
    GATHER = 2
    FINISH = 3


class PhaseCounts(data.Struct):
    """Heads in each phase."""

    scan: 7
    gather: 7
    finish: 7


class _Kind(enum.Enum, shape=3):
    PLAN = 0
    END = 1
    DONE = 2
    ALPHA = 3
    FINISHED = 4


class _Event(data.Struct):
    kind: _Kind
    context: CONTEXT_BITS
    dense: 1
    group: 4
    gather: 1
    slot: SLOT_BITS
    count: signed(18)
    pages: 20
    faults: FAULT_BITS


class _Record(data.Struct):
    phase: Phase
    waits: 4
    """Ends of walks and alphas that are still to come in this phase."""
    count: signed(18)
    """Items of Done that are still to come; below zero while a walk is not known to have ended."""
    group: 4
    pages: 20
    faults: FAULT_BITS
    drain: 1
    slot: SLOT_BITS
    weighed: 1


class _Finish(data.Struct):
    context: CONTEXT_BITS
    record: _Record


class ContextTable(wiring.Component):
    """Scheduler of the heads in flight.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    start : In, pulse before a batch. contexts : In, contexts in use. watchdog : In, cycles. memory_error : In.
    i : In stream of HeadPlan.
    i_end : array of In streams of WalkEnd, one a walker: two, or three with `mask_beats`.
    i_done : array of `config.channels` In streams of Done.
    i_alpha : In stream of Alpha. i_finished : In stream of contexts whose completion is written.
    o_free : Out stream of free contexts. o_slot : Out stream of free slots.
    o_tail, o_dense : Out streams of contexts, to TokenWalker. o_select : Out stream of SelectCommand.
    o_finish : Out stream of FinishCommand.
    credit_valid, credit : Out, broadcast of BlockCredit.
    phases : Out PhaseCounts. expired : Out.
    """

    def __init__(self, config: AttendConfig) -> None:
        self.config = config
        number = stream.Signature(CONTEXT_BITS)
        super().__init__(
            {
                "start": In(1),
                "contexts": In(CONTEXT_BITS + 1),
                "watchdog": In(32),
                "memory_error": In(1),
                "i": In(stream.Signature(HeadPlan)),
                "i_end": In(stream.Signature(WalkEnd)).array(3 if config.mask_beats else 2),
                "i_done": In(stream.Signature(Done)).array(config.channels),
                "i_alpha": In(stream.Signature(Alpha)),
                "i_finished": In(number),
                "o_free": Out(number),
                "o_slot": Out(stream.Signature(SLOT_BITS)),
                "o_tail": Out(number),
                "o_dense": Out(number),
                "o_select": Out(stream.Signature(SelectCommand)),
                "o_finish": Out(stream.Signature(FinishCommand)),
                "credit_valid": Out(1),
                "credit": Out(BlockCredit),
                "phases": Out(PhaseCounts),
                "expired": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """An event at a time: pick it, apply it to its context's record, act on what that completes."""
        m = Module()
        self._places = max(2, self.config.contexts)
        self._event, self._next = event, after = Signal(_Event), Signal(_Record)
        m.submodules.records = records = Memory(shape=_Record, depth=self._places, init=[])
        write, read = records.write_port(), records.read_port(domain="comb")
        # Read without a clock: SWEEP writes a record in the cycle in which it names it.
        before, place = read.data, Signal(CONTEXT_BITS)
        starting, swept = Signal(), Signal()
        self._outputs(m)
        self._watch(m)
        self._dones = self._merge_dones(m)
        m.d.comb += [read.addr.eq(event.context), write.addr.eq(event.context), write.data.eq(after)]
        with m.If(self.start):
            m.d.sync += starting.eq(1)

        with m.FSM():
            with m.State("PICK"):
                # Counts and faults of an event are added to the record: those that it does not have must be 0.
                m.d.sync += [event.eq(0), place.eq(0)]
                # Before any plan of the new batch: its records must not begin with counts of the old one.
                with m.If(starting):
                    m.next = "CLEAR"
                with m.Elif(self.expired & ~swept):
                    m.next = "SWEEP"
                with m.Else():
                    self._pick(m)
            with m.State("APPLY"):
                m.d.sync += after.eq(before)
                self._apply(m, before)
                m.next = "ACT"
            with m.State("ACT"):
                m.d.comb += write.en.eq(1)
                self._act(m, before, write.data)
                m.next = "PICK"
            with m.State("CLEAR"):
                m.d.comb += [write.en.eq(1), write.addr.eq(place), write.data.eq(0)]
                m.d.sync += [place.eq(place + 1), starting.eq(0), swept.eq(0)]
                with m.If(place == self._places - 1):
                    m.next = "PICK"
            with m.State("SWEEP"):
                m.d.comb += [read.addr.eq(place), write.addr.eq(place)]
                self._sweep(m, place, before, write)
                m.d.sync += place.eq(place + 1)
                with m.If(place == self._places - 1):
                    m.d.sync += swept.eq(1)
                    m.next = "PICK"
        return m

    def _outputs(self, m: Module) -> None:
        """Queues with room for every context, and the plans that go with what leaves them."""
        for name in ("tail", "dense"):
            queue = m.submodules[name] = StreamQueue(CONTEXT_BITS, self._places)
            wiring.connect(m, queue.o, wiring.flipped(getattr(self, f"o_{name}")))
            setattr(self, f"_{name}", queue.i)
        m.submodules.selects = selects = StreamQueue(CONTEXT_BITS, self._places)
        m.submodules.finishes = finishes = StreamQueue(_Finish, self._places)
        self._select, self._finish = selects.i, finishes.i
        m.d.comb += [queue.payload.eq(self._event.context) for queue in (self._tail, self._dense, self._select)]
        plan, leaves = self.i.payload, finishes.o.payload
        for name, queue, context, planned, o in (
            ("select_plans", selects, selects.o.payload, plan.select, self.o_select),
            ("finish_plans", finishes, leaves.context, plan.finish, self.o_finish),
        ):
            memory = m.submodules[name] = Memory(shape=planned.shape(), depth=self._places, init=[])
            write, read = memory.write_port(), memory.read_port(domain="comb")
            m.d.comb += [
                write.addr.eq(plan.select.context),
                write.data.eq(planned),
                # Kept by context: other plans come before this head's scan has ended.
                write.en.eq(self.i.valid & self.i.ready),
                read.addr.eq(context),
                o.payload.eq(read.data),
                o.valid.eq(queue.o.valid),
                queue.o.ready.eq(o.ready),
            ]
        for name in ("pages", "drain", "slot", "weighed"):
            m.d.comb += self.o_finish.payload[name].eq(leaves.record[name])
        # Looked at as the command leaves: an error after the head's last event counts, too.
        memory = Mux(self.memory_error, Fault.MEMORY, 0)
        m.d.comb += self.o_finish.payload.faults.eq(leaves.record.faults | memory)

        m.submodules.free = free = FreeList(self._places, CONTEXT_BITS)
        m.submodules.slots = slots = FreeList(max(2, self.config.gather_slots), SLOT_BITS)
        wiring.connect(m, free.o, wiring.flipped(self.o_free))
        shared = Signal(3)  # log2 of the slots that one head takes
        for log2 in range(CONTEXT_BITS + 1):
            with m.If(self.contexts[log2]):
                m.d.sync += shared.eq(max(self.config.contexts.bit_length() - 1 - log2, 0))
        count = C(self.config.gather_slots) >> shared
        self._freed, self._emptied = free.i, slots.i
        m.d.comb += [
            free.start.eq(self.start), free.count.eq(self.contexts), free.i.payload.eq(self._event.context),
            # At least one slot, or no head would ever gather.
            slots.start.eq(self.start), slots.count.eq(Mux(count == 0, 1, count)),
            slots.i.payload.eq(self._next.slot >> shared), slots.o.ready.eq(self.o_slot.ready),
            self.o_slot.valid.eq(slots.o.valid), self.o_slot.payload.eq(slots.o.payload << shared),
        ]  # fmt: skip

    def _watch(self, m: Module) -> None:
        """Cycles since something happened, while something should."""
        idle, busy = Signal(32), (self.phases.scan != 0) | (self.phases.gather != 0)
        m.d.sync += idle.eq(Mux(busy, idle + 1, 0))
        with m.If((self.watchdog != 0) & (idle == self.watchdog)):
            m.d.sync += self.expired.eq(1)
        with m.If(self.start):
            m.d.sync += self.expired.eq(0)
        self._idle = idle

    def _merge_dones(self, m: Module) -> Any:
        """Merge what the channels have done, one after the other."""
        m.submodules.merge = merge = Merge(Done, max(2, self.config.channels))
        m.submodules.dones = dones = StreamQueue(merge.o.payload.shape(), 4)
        for index, i in enumerate(self.i_done):
            m.submodules[f"done_{index}"] = buffer = HalfBuffer(Done)  # keeps the channel's logic from the merge
            wiring.connect(m, wiring.flipped(i), buffer.i)
            wiring.connect(m, buffer.o, merge.i[index])
        wiring.connect(m, merge.o, dones.i)
        return dones.o

    def _pick(self, m: Module) -> None:
        """The next event; after the watchdog only plans and finished heads count."""
        plan, alpha, dones = self.i.payload, self.i_alpha.payload, self._dones
        done, source = dones.payload.item, dones.payload.source
        credit = (done.kind == RequestKind.INDEX) & ~self.expired
        m.d.comb += [self.credit.channel.eq(source), self.credit.context.eq(done.context)]
        with m.If(self.i.valid):
            values = {"kind": _Kind.PLAN, "context": plan.select.context, "dense": plan.token.dense,
                      "group": plan.select.group, "faults": plan.finish.faults}  # fmt: skip
            self._take(m, self.i, values, always=True)
        for i in self.i_end:
            end = i.payload
            with m.Elif(i.valid):
                values = {"kind": _Kind.END, "context": end.context, "count": end.dones, "pages": end.requests,
                          "gather": end.kind == RequestKind.GATHER, "slot": end.slot, "faults": end.faults}  # fmt: skip
                self._take(m, i, values)
        with m.Elif(dones.valid):
            m.d.comb += self.credit_valid.eq(credit)
            self._take(m, dones, {"kind": _Kind.DONE, "context": done.context, "count": -1, "faults": done.faults})
        with m.Elif(self.i_alpha.valid):
            values = {"kind": _Kind.ALPHA, "context": alpha.context, "faults": alpha.faults}
            self._take(m, self.i_alpha, values)
        with m.Elif(self.i_finished.valid):
            values = {"kind": _Kind.FINISHED, "context": self.i_finished.payload}
            self._take(m, self.i_finished, values, always=True)

    def _take(self, m: Module, source: Any, values: dict[str, Any], *, always: bool = False) -> None:
        # Taken after the watchdog, too, and dropped: its source must not stand still.
        m.d.comb += source.ready.eq(1)
        m.d.sync += [self._event[name].eq(value) for name, value in values.items()]
        m.d.sync += self._idle.eq(0)
        with m.If(C(always, 1) | ~self.expired):
            m.next = "APPLY"

    def _apply(self, m: Module, before: Any) -> None:
        """The record with the event in it."""
        event, after = self._event, self._next
        m.d.sync += [
            after.count.eq(before.count + event.count),
            after.pages.eq(before.pages + event.pages),
            after.faults.eq(before.faults | event.faults),
        ]
        with m.Switch(event.kind):
            with m.Case(_Kind.PLAN):
                faults = event.faults | Mux(self.expired, Fault.WATCHDOG, 0)
                m.d.sync += [after.eq(0), after.faults.eq(faults), after.group.eq(event.group)]
                m.d.sync += [after.phase.eq(Phase.SCAN), after.waits.eq(2)]
                with m.If(event.dense):
                    m.d.sync += [after.phase.eq(Phase.GATHER), after.waits.eq(1)]
                with m.If(faults != 0):
                    m.d.sync += after.phase.eq(Phase.FINISH)
            with m.Case(_Kind.END):
                m.d.sync += after.waits.eq(before.waits - 1)
                with m.If(event.gather):
                    m.d.sync += [after.drain.eq(1), after.slot.eq(event.slot)]
            with m.Case(_Kind.ALPHA):
                m.d.sync += [after.waits.eq(before.waits - 1), after.weighed.eq(1)]
            with m.Case(_Kind.FINISHED):
                m.d.sync += after.phase.eq(Phase.IDLE)

    def _act(self, m: Module, before: Any, written: Any) -> None:
        """Act on the event; `written` is the record that is kept."""
        event, after, finish = self._event, self._next, Signal()
        planned, complete = event.kind == _Kind.PLAN, Signal()
        m.d.comb += complete.eq((after.waits == 0) & (after.count == 0) & ~planned & (event.kind != _Kind.FINISHED))
        with m.If((after.phase == Phase.SCAN) & complete):
            with m.If(after.faults != 0):
                m.d.comb += finish.eq(1)
            with m.Else():
                m.d.comb += [
                    self._select.valid.eq(1),
                    written.phase.eq(Phase.GATHER),
                    written.waits.eq(after.group + 1),
                ]
        with m.If((after.phase == Phase.GATHER) & complete):
            m.d.comb += finish.eq(1)
        with m.If(planned):
            m.d.comb += [
                self._tail.valid.eq(after.phase == Phase.SCAN),
                self._dense.valid.eq(after.phase == Phase.GATHER),
                finish.eq(after.phase == Phase.FINISH),
            ]
        with m.If(event.kind == _Kind.FINISHED):
            m.d.comb += [self._freed.valid.eq(1), self._emptied.valid.eq(after.drain)]
        with m.If(finish):
            m.d.comb += written.phase.eq(Phase.FINISH)
        m.d.comb += [
            self._finish.valid.eq(finish),
            self._finish.payload.context.eq(event.context),
            self._finish.payload.record.eq(after),
        ]
        self._count(m, before.phase, written.phase)

    def _sweep(self, m: Module, place: Signal, before: Any, write: Any) -> None:
        """Finish the context at `place` with WATCHDOG if it is in its scan or gather."""
        hit = Signal()
        m.d.comb += [
            hit.eq((before.phase == Phase.SCAN) | (before.phase == Phase.GATHER)),
            write.en.eq(hit),
            write.data.eq(before),
            write.data.phase.eq(Phase.FINISH),
            write.data.faults.eq(before.faults | Fault.WATCHDOG),
            write.data.drain.eq(0),
            write.data.weighed.eq(0),
            self._finish.valid.eq(hit),
            self._finish.payload.context.eq(place),
            self._finish.payload.record.eq(write.data),
        ]
        with m.If(hit):
            self._count(m, before.phase, write.data.phase)

    def _count(self, m: Module, before: Any, after: Any) -> None:
        for name, phase in {"scan": Phase.SCAN, "gather": Phase.GATHER, "finish": Phase.FINISH}.items():
            count = self.phases[name]
            m.d.sync += count.eq(count + (after == phase) - (before == phase))
