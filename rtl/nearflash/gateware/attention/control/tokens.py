"""Token walker: from contexts and masks to the requests for token groups.

    i_tail ─────────────┐   plans by context
    i_dense ────────────┤         │
    i_start, i_mask ────┴─► tokens of a group ─► TokenSpans ─► requests ─► o
                            page table ─► entries, read ahead ─┘

Contract: a head on i_tail gets TAIL requests for the groups behind its last whole block; one on i_dense or i_start gets
a slot, the GatherWrite broadcast, then GATHER requests for the groups with a wanted token (i_dense: all; i_start: those
of its mask, which follows on i_mask: a bit a group in page mode, else a bit a token). Tokens from S on are never
wanted. Each request asks for the codewords that hold its tokens' K (TAIL) or K and V. Then the head's WalkEnd leaves.
After an entry that this build cannot read the head has fault ENTRY and no further requests.

Timing: n / 4 + 4 cycles a group, 2 for an unselected one in page mode; back-pressure: yes.
Limits: a 64-bit port. Its plan is written before a context comes.
"""

from typing import Any

from amaranth import C, Module, Mux, Signal
from amaranth.hdl import signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.entry import PageEntryLayout, entry_is_legal
from nearflash.gateware.attention.control.interfaces import GROUP_BITS, TokenPlan, WalkEnd
from nearflash.gateware.attention.control.spans import TokenSpans
from nearflash.gateware.attention.engine.interfaces import (
    CONTEXT_BITS,
    SLOT_BITS,
    TOKEN_BITS,
    GatherStart,
    GatherWrite,
    MaskBeat,
    RequestKind,
    RoutedRequest,
)
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.transfer import BusError

__all__ = ["TokenWalker"]


class TokenWalker(wiring.Component):
    """Walks over a head's token groups.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    plan_valid, plan_context, plan : In, broadcast: the plan of a context.
    i_tail, i_dense : In streams of contexts.
    i_start : In stream of GatherStart. i_mask : In stream of MaskBeat, behind each of its items.
    i_slot : In stream of free slots.
    gather_valid, gather : Out, broadcast of GatherWrite.
    o : Out stream of RoutedRequest (of any source). o_end : Out stream of WalkEnd.
    bus : Out Axi4ReadSignature. clear : In, forgets `error`. error : Out BusError.
    idle : Out, no head is being walked.
    """

    def __init__(self, config: AttendConfig) -> None:
        self.config = config
        super().__init__(
            {
                "plan_valid": In(1),
                "plan_context": In(CONTEXT_BITS),
                "plan": In(TokenPlan),
                "i_tail": In(stream.Signature(CONTEXT_BITS)),
                "i_dense": In(stream.Signature(CONTEXT_BITS)),
                "i_start": In(stream.Signature(GatherStart)),
                "i_mask": In(stream.Signature(MaskBeat)),
                "i_slot": In(stream.Signature(SLOT_BITS)),
                "gather_valid": Out(1),
                "gather": Out(GatherWrite),
                "o": Out(stream.Signature(RoutedRequest)),
                "o_end": Out(stream.Signature(WalkEnd)),
                "bus": Out(Axi4ReadSignature(64)),
                "clear": In(1),
                "error": Out(BusError),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Choose a head, read its table, then group by group collect its tokens and send the request."""
        m = Module()
        m.submodules.reader = self._reader = BurstReader(64, max_outstanding=4, max_burst_bytes=512)
        m.submodules.spans = self._spans = TokenSpans()
        wiring.connect(m, self._reader.bus, wiring.flipped(self.bus))
        m.d.comb += [self._reader.clear.eq(self.clear), self.error.eq(self._reader.error)]
        self._group, self._left = Signal(GROUP_BITS), Signal(TOKEN_BITS)  # group, tokens from its first one on
        self._end, self._masked = Signal(WalkEnd), Signal()
        self._references = Signal(data.ArrayLayout(signed(12), 8))
        self._plan = self._plans(m)
        self._last_group = Signal(GROUP_BITS)  # of the plan, a cycle behind it
        m.d.sync += self._last_group.eq(self._plan.groups - 1)
        self._tail = self._end.kind == RequestKind.TAIL
        settle = Signal(range(TokenSpans.LATENCY))
        collecting, sending = Signal(), Signal()
        group_ends = self._collect(m, collecting)
        sent = self._send(m, sending)

        m.d.comb += self.o_end.payload.eq(self._end)
        with m.FSM():
            with m.State("WAIT-HEAD"):
                m.d.comb += self.idle.eq(1)
                self._choose(m)
            with m.State("SET-UP"):  # the plan's constants go to registers
                m.next = "BEGIN"
            with m.State("BEGIN"):
                with m.If(self._begin(m)):
                    m.next = "COLLECT"
                with m.If(self._tail & (self._plan.tail_group == self._plan.groups)):
                    m.next = "END"
            with m.State("COLLECT"):
                m.d.comb += collecting.eq(1)
                m.d.sync += settle.eq(TokenSpans.LATENCY - 1)
                with m.If(group_ends):
                    m.next = "SETTLE"
                    with m.If(self._skips):
                        m.next = "SEND"
            with m.State("SETTLE"):
                m.d.sync += settle.eq(settle - 1)
                with m.If(settle == 0):
                    m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += sending.eq(1)
                with m.If(sent):
                    m.next = "COLLECT"
                    with m.If(self._group == self._last_group):
                        m.next = "END"
            with m.State("END"):
                # After the last request: the end states how many there were.
                m.d.comb += self.o_end.valid.eq(~self.o.valid)
                with m.If(self.o_end.valid & self.o_end.ready):
                    m.next = "WAIT-HEAD"
        return m

    def _plans(self, m: Module) -> Any:
        """The plan of the context at hand."""
        m.submodules.plans = plans = Memory(shape=TokenPlan, depth=self.config.contexts, init=[])
        write, read = plans.write_port(), plans.read_port(domain="comb")
        m.d.comb += [
            write.addr.eq(self.plan_context),
            write.data.eq(self.plan),
            write.en.eq(self.plan_valid),
            read.addr.eq(self._end.context),
        ]
        return read.data

    def _choose(self, m: Module) -> None:
        """The head that has come farthest; a slot for its sums."""
        start, end = self.i_start.payload, self._end
        m.d.sync += [end.eq(0), self._masked.eq(0), end.kind.eq(RequestKind.GATHER), end.slot.eq(self.i_slot.payload)]
        # A gather begins with a slot for its sums: without one the walker does tails meanwhile.
        with m.If(self.i_start.valid & self.i_slot.valid):
            m.d.comb += [self.i_start.ready.eq(1), self.i_slot.ready.eq(1)]
            m.d.sync += [end.context.eq(start.context), self._masked.eq(1), self._references.eq(start.references)]
            m.next = "SET-UP"
        with m.Elif(self.i_dense.valid & self.i_slot.valid):
            m.d.comb += [self.i_dense.ready.eq(1), self.i_slot.ready.eq(1)]
            m.d.sync += end.context.eq(self.i_dense.payload)
            m.next = "SET-UP"
        with m.Elif(self.i_tail.valid):
            m.d.comb += self.i_tail.ready.eq(1)
            m.d.sync += [end.context.eq(self.i_tail.payload), end.kind.eq(RequestKind.TAIL)]
            m.next = "SET-UP"

    def _begin(self, m: Module) -> Signal:
        """Ask for the table; tell the channels. True when the table's command is taken."""
        plan, command, begun = self._plan, self._reader.i_command, Signal()
        first = Mux(self._tail, plan.tail_group, 0)
        m.d.sync += [self._group.eq(first), self._left.eq(Mux(self._tail, plan.tail_tokens, plan.tokens))]
        m.d.comb += [
            command.valid.eq(1),
            command.payload.address.eq(plan.token_table + (first << 3)),
            command.payload.beats.eq(plan.groups - first),
            begun.eq(command.ready),
            # In one cycle, and before any page of the gather is asked for.
            self.gather_valid.eq(begun & ~self._tail),
            self.gather.context.eq(self._end.context),
            self.gather.slot.eq(self._end.slot),
            self.gather.references.eq(Mux(plan.fixed, plan.references.as_value(), self._references.as_value())),
        ]
        return begun

    def _collect(self, m: Module, collecting: Signal) -> Signal:
        """Four tokens a cycle while `collecting`; an unselected group in one. True with a group's last ones."""
        plan, spans, mask = self._plan, self._spans, self.i_mask
        step, tokens, wanted = Signal(4), Signal(64), Signal(4)
        moves, ends, last = Signal(), Signal(), Signal()
        last_step = Signal(4)  # of the plan, a cycle behind it
        m.d.sync += last_step.eq((plan.group_tokens >> 2) - 1)
        by_page, page_bit = self._masked & plan.page_mode, mask.payload.mask.bit_select(self._group[:2], 1)
        selected = Mux(by_page, page_bit.replicate(4), mask.payload.mask)
        final = self._group == self._last_group
        self._skips = skips = Signal()
        # Tokens past the head's end are never wanted, whatever mask and page size say.
        below = Mux(self._left >= 4, C(15, 4), (1 << self._left[:2]) - 1)
        m.d.comb += [
            wanted.eq(Mux(self._masked, selected, C(15, 4)) & below),
            moves.eq(collecting & (mask.valid | ~self._masked)),
            skips.eq(by_page & ~page_bit),
            last.eq((step == last_step) | (self._left <= 4) | skips),
            ends.eq(moves & last),
            mask.ready.eq(moves & self._masked & (~plan.page_mode | (last & (self._group[:2].all() | final)))),
            spans.step.eq(moves),
            spans.wanted.eq(wanted),
            spans.dim_rows.eq(plan.dim_rows),
            spans.interleaved.eq(plan.interleaved),
            spans.page_codewords.eq(plan.page_codewords),
            spans.values.eq(~self._tail),
        ]
        with m.If(moves):
            m.d.sync += [step.eq(Mux(last, 0, step + 1)), tokens.word_select(step, 4).eq(wanted)]
            m.d.sync += self._left.eq(self._left - Mux(skips, plan.group_tokens, 4))
        self._tokens = tokens
        return ends

    def _send(self, m: Module, sending: Signal) -> Signal:
        """The request of a group that has wanted tokens. True when its entry is used."""
        end, entry, request = self._end, Signal(PageEntryLayout), self.o.payload.request
        wanted, legal, sent = Signal(), Signal(), Signal()
        m.d.comb += [
            entry.eq(self._reader.o.payload),
            legal.eq(entry_is_legal(entry, self.config)),
            wanted.eq(self._tokens.any() & ~end.faults.any()),
            # The entry is used up even where nothing is wanted: the table has one a group.
            sent.eq(sending & self._reader.o.valid & (~wanted | ~self.o.valid | self.o.ready)),
            self._reader.o.ready.eq(sent),
            self._spans.begin.eq(sent | self.idle),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(sent):
            m.d.sync += [self._group.eq(self._group + 1), self._tokens.eq(0)]
            with m.If(wanted & legal):
                m.d.sync += [self.o.valid.eq(1), end.dones.eq(end.dones + 1), end.requests.eq(end.requests + 1)]
                m.d.sync += self.o.payload.channel.eq(entry.channel)
                values = {
                    "context": end.context, "kind": end.kind, "index": self._group, "block": 0, "page": 0,
                    "expected": 0, "codewords": self._spans.codewords, "rows": self._tokens,
                    "memory": entry.memory, "address": entry.address,
                }  # fmt: skip
                m.d.sync += [request[name].eq(value) for name, value in values.items()]
            with m.Elif(wanted):
                m.d.sync += end.faults.eq(Fault.ENTRY)
        return sent
