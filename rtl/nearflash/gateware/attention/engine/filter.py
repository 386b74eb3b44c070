"""Beat filter: from checked codewords to beats of elements that somebody wants, each with its place.

    i_page ─► Planner ─► plans ─┐
    i ──────────────────────────┴─► place of the beat, wanted? ─► o

Contract: of each request the wanted beats in order, then one END. Beats of tokens or rows that are not in the header's
`rows` are dropped, as is what fills up a row or page. A codeword's faults are reported once, at its aux beat; its data
pass all the same.

Timing: latency LATENCY cycle from a beat to o once its plan is there; one beat a cycle; one more cycle a request
(END); back-pressure: yes.
"""

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.gateware.attention.engine.beats import ElementBeat, RequestRecord, TicketFault, What
from nearflash.gateware.attention.engine.codeword_plan import CodewordPlan, Planner
from nearflash.gateware.attention.engine.interfaces import ContextRecord, PageHeader, RequestKind
from nearflash.gateware.attention.engine.multiplexer import choose
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.nand.interfaces import CodewordBeat
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["BeatFilter"]

_PLANS = 4


class BeatFilter(wiring.Component):
    """The fine filter.

    Parameters: contexts, a power of two.
    Members
    -------
    i_context : In, {valid, record}: broadcast.
    i_page : In stream of PageHeader. i : In stream of CodewordBeat.
    o_request : Out stream of RequestRecord, ahead of the request's beats.
    o : Out stream of ElementBeat.
    o_fault : Out, TicketFault: faults of a codeword, in the cycle in which its aux beat moves, else 0.
    """

    #: Cycles from a beat on `i` to `o`.
    LATENCY = 1

    def __init__(self, contexts: int) -> None:
        self._contexts = contexts
        super().__init__(
            {
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "i_page": In(stream.Signature(PageHeader)),
                "i": In(stream.Signature(CodewordBeat)),
                "o_request": Out(stream.Signature(RequestRecord)),
                "o": Out(stream.Signature(ElementBeat)),
                "o_fault": Out(TicketFault),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The aux beat takes a plan; the data beats count on from it."""
        m = Module()
        m.submodules.planner = planner = Planner(self._contexts)
        m.submodules.plans = plans = StreamQueue(CodewordPlan, _PLANS)
        m.d.comb += planner.i_context.eq(self.i_context)
        wiring.connect(m, wiring.flipped(self.i_page), planner.i)
        wiring.connect(m, planner.o_request, wiring.flipped(self.o_request))
        wiring.connect(m, planner.o, plans.i)

        beat, plan = self.i.payload, Signal(CodewordPlan)
        free, take, end = Signal(), Signal(), Signal()
        moved, wanted = Signal(), Signal()  # two registers, as each of them comes late
        m.d.comb += [
            self.o.valid.eq(moved & wanted),
            free.eq(self.o.ready | ~self.o.valid),
            # A codeword waits for its plan; the END behind the last one takes a cycle of its own.
            self.i.ready.eq(free & ~end & (plans.o.valid | ~beat.first)),
            take.eq(self.i.valid & self.i.ready),
            plans.o.ready.eq(take & beat.first),
            self.o_fault.ticket.eq(plans.o.payload.ticket),
            self.o_fault.faults.eq(Mux(plans.o.ready, self._faults(beat), 0)),
        ]
        with m.If(free):
            of_data = self._data_wanted(m, plan)
            m.d.sync += [
                moved.eq(take | end),
                wanted.eq(end | Mux(beat.first, self._aux_wanted(plans.o.payload), of_data)),
            ]
        with m.If(take & beat.first):
            m.d.sync += plan.eq(plans.o.payload)
            self._aux(m, plans.o.payload, beat)
        with m.Elif(take):
            self._data(m, plan, beat)
            m.d.sync += end.eq(beat.last & plan.last)
        with m.If(end & free):
            m.d.sync += [end.eq(0), self.o.payload.what.eq(What.END)]
        return m

    def _aux_wanted(self, plan: data.View) -> Value:
        return (plan.kind == RequestKind.INDEX) & plan.beats.any()

    def _data_wanted(self, m: Module, plan: data.View) -> Value:
        token, value = self._token(m, plan)
        wanted = choose(list(plan.rows), token) & ~token[6:].any() & ((plan.kind == RequestKind.GATHER) | ~value)
        return wire(m, Mux(plan.kind == RequestKind.INDEX, plan.beats.any(), wanted))

    def _token(self, m: Module, plan: data.View) -> tuple[Value, Value]:
        """Number of the token, and whether it is of V."""
        token = wire(m, Mux(plan.interleaved, plan.unit >> 1, plan.unit))
        return token, wire(m, Mux(plan.interleaved, plan.unit[0], plan.value))

    def _faults(self, beat: data.View) -> Mux:
        fault = Mux(beat.misdirected, Fault.MISDIRECTED.value, 0)
        return Mux(beat.uncorrectable, Fault.UNCORRECTABLE.value, fault)

    def _aux(self, m: Module, plan: data.View, beat: data.View) -> None:
        m.d.sync += [
            self.o.payload.what.eq(What.AUX),
            self.o.payload.ticket.eq(plan.ticket),
            self.o.payload.gather.eq(plan.kind == RequestKind.GATHER),
            self.o.payload.data.eq(beat.data),
            self.o.payload.channel.eq(plan.channel),
            self.o.payload.row.eq(plan.part << 6),
            self.o.payload.first.eq(plan.part == 0),
        ]

    def _data(self, m: Module, plan: data.View, beat: data.View) -> None:
        o, index = self.o.payload, wire(m, plan.kind == RequestKind.INDEX)
        row_end = wire(m, plan.row + 1 == plan.dim_rows)
        token, value = self._token(m, plan)
        m.d.sync += [
            o.data.eq(beat.data),
            plan.row.eq(plan.row + 1),
        ]
        with m.If(row_end):
            m.d.sync += [plan.row.eq(0), plan.unit.eq(plan.unit + 1)]
        # Stays at 0: beats behind the plan's are padding.
        with m.If(plan.beats.any()):
            m.d.sync += plan.beats.eq(plan.beats - 1)
        with m.If(index):
            # The codeword's part is in the upper bits of `row` since its aux beat.
            m.d.sync += o.what.eq(What.ROW)
            m.d.sync += o.row.eq(Mux(o.what == What.AUX, o.row, o.row + 1))
        with m.Else():
            m.d.sync += [
                o.what.eq(Mux(value, What.VALUE, What.KEY)),
                o.token.eq(token),
                o.row.eq(plan.row),
                o.first.eq(plan.row == 0),
                o.last.eq(row_end),
            ]
