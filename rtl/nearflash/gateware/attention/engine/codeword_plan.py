"""Codeword planner: where each codeword that a request asks for lies, before the codeword is there.

A codeword holds 64 beats; a token has R = d/4 beats of K and R of V. With n the codewords passed,

    separate:     beat 64·n + b of K (and again of V)  = token · R + row
    interleaved:  beat 64·n + b of the page            = (2·token + value) · R + row
    index:        beat 64·(n mod row_codewords) + b of row n div row_codewords, of channel page·m + row

kept up by steps: (64 div R, 64 mod R) from a table of 64 entries, so there is no divider.
"""

from amaranth import Array, Module, Mux, Signal
from amaranth.hdl import C
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.pages import IndexFormat
from nearflash.gateware.attention.engine.beats import TICKET_BITS, RequestRecord
from nearflash.gateware.attention.engine.interfaces import ContextRecord, PageHeader, RequestKind
from nearflash.gateware.fp.pipeline import register, wire

__all__ = ["CodewordPlan", "Planner"]

_BEATS = 64


class CodewordPlan(data.Struct):
    """Place of a codeword's first data beat."""

    ticket: TICKET_BITS
    kind: RequestKind
    rows: 64
    """Tokens of the group that are wanted."""
    dim_rows: 7
    interleaved: 1
    unit: 8
    """Token, or with interleaved pages 2·token + value."""
    row: 6
    value: 1
    """A codeword of a separate V page."""
    channel: 8
    part: 2
    """INDEX: number of the codeword in its row."""
    beats: 7
    """INDEX: beats of the codeword that hold wanted elements."""
    last: 1
    """The request's last codeword."""


class _Constants(data.Struct):
    """Kept part of a ContextRecord: no bit that nobody reads. Lengths are in rows of four tokens."""

    query_base: 12
    dim_rows: 7
    group: 4
    group_rows: 5
    interleaved: 1
    block_rows: 9
    index_format: 2
    index_rows: 7
    row_codewords: 3
    page_codewords: 6
    limit_shift: 4


class Planner(wiring.Component):
    """Walks the codewords of each request.

    Contract: each request gives one `o_request`, then one `o` per codeword that it asks for, ascending. A context must
    be written before its requests come.

    Timing: a plan every cycle; a codeword that is not asked for takes a cycle too; back-pressure: yes.

    Parameters: contexts, a power of two.
    Members: i_context (valid, ContextRecord), i (stream of PageHeader), o_request (stream of RequestRecord), o (stream
    of CodewordPlan).
    """

    def __init__(self, contexts: int) -> None:
        self._contexts = contexts
        super().__init__(
            {
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "i": In(stream.Signature(PageHeader)),
                "o_request": Out(stream.Signature(RequestRecord)),
                "o": Out(stream.Signature(CodewordPlan)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Look the context up, announce the request, walk its codewords."""
        m = Module()
        header, record = Signal(PageHeader), self._lookup(m)
        self._quotient, self._remainder = (
            register(m, Array(C(table(_BEATS, rows or _BEATS)) for rows in range(_BEATS))[record.dim_rows[:6]])
            for table in (lambda a, b: a // b, lambda a, b: a % b)
        )
        ticket = Signal(TICKET_BITS)
        m.d.comb += [
            self.o_request.payload[name].eq(value)
            for name, value in {
                "ticket": ticket, "context": header.context, "kind": header.kind, "index": header.index,
                "block": header.block, "expected": header.expected, "rows": header.rows,
                "query_base": record.query_base, "dim_rows": record.dim_rows, "group": record.group,
                "group_rows": record.group_rows, "block_rows": record.block_rows,
                "index_format": record.index_format, "limit_shift": record.limit_shift,
            }.items()
        ]  # fmt: skip
        with m.FSM():
            with m.State("TAKE"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += header.eq(self.i.payload)
                with m.If(self.i.valid):
                    m.next = "LOOK-UP"
            with m.State("LOOK-UP"):
                m.next = "ANNOUNCE"
            with m.State("ANNOUNCE"):
                m.d.comb += self.o_request.valid.eq(1)
                # In every cycle of the wait: what it sets does not depend on how long that is.
                self._begin(m, header, record)
                with m.If(self.o_request.ready):
                    m.next = "MULTIPLY"
            with m.State("MULTIPLY"):  # page·m, bit by bit
                channel = self.o.payload.channel
                m.d.sync += [channel.eq(channel + Mux(header.page[0], self._rows, 0)), self._rows.eq(self._rows << 1)]
                m.d.sync += header.page.eq(header.page >> 1)
                with m.If(header.page == 0):
                    m.next = "WALK"
            with m.State("WALK"):
                with m.If(self._walk(m, header, record)):
                    m.d.sync += ticket.eq(ticket + 1)
                    m.next = "TAKE"
        m.d.comb += [
            self.o.payload.ticket.eq(ticket),
            self.o.payload.kind.eq(header.kind),
            self.o.payload.dim_rows.eq(record.dim_rows),
            self.o.payload.interleaved.eq(record.interleaved & (header.kind != RequestKind.INDEX)),
        ]
        return m

    def _lookup(self, m: Module) -> data.View:
        m.submodules.contexts = contexts = Memory(shape=_Constants, depth=max(2, self._contexts), init=[])
        write, read, given = contexts.write_port(), contexts.read_port(), self.i_context.record
        rows = {"group_rows": given.group_tokens >> 2, "block_rows": given.block_tokens >> 2}
        for name, _ in data.Layout.cast(_Constants):
            m.d.comb += write.data[name].eq(rows[name] if name in rows else given[name])
        m.d.comb += [
            write.addr.eq(given.context),
            write.en.eq(self.i_context.valid),
            # Read as the header is taken; its registers are what LOOK-UP waits for.
            read.addr.eq(self.i.payload.context),
            read.en.eq(self.i.ready),
        ]
        record = Signal(_Constants)
        m.d.sync += record.eq(read.data)
        return record

    def _begin(self, m: Module, header: data.View, record: data.View) -> None:
        plan = self.o.payload
        fp16, int8 = (record.index_format == form for form in (IndexFormat.FP16, IndexFormat.INT8))
        rows = record.block_rows
        beats = wire(m, Mux(fp16, rows, Mux(int8, rows >> 1, rows >> 2)))
        self._rows, self._tail, self._number = Signal(8), Signal(6), Signal(6)
        m.d.sync += [
            self._tail.eq(beats),
            self._number.eq(0),
            plan.rows.eq(header.rows),
            plan.unit.eq(0),
            plan.row.eq(0),
            plan.value.eq(0),
            plan.channel.eq(0),
            self._rows.eq(record.index_rows),
            plan.part.eq(0),
        ]

    def _walk(self, m: Module, header: data.View, record: data.View) -> Signal:
        """One codeword a cycle; returns whether that was the last one."""
        plan = self.o.payload
        step, last, asked = Signal(), Signal(), header.codewords[0]
        tail, row_end = self._tail, Signal()
        m.d.comb += [
            last.eq(~header.codewords[1:].any()),
            plan.last.eq(last),
            row_end.eq(plan.part + 1 == record.row_codewords),
            plan.beats.eq(Mux(header.rows[0], Mux(row_end & tail.any(), tail, _BEATS), 0)),
            # A codeword that is not asked for moves the counters, and goes to no one.
            self.o.valid.eq(asked),
            step.eq(self.o.ready | ~asked),
        ]
        # A codeword's beats divided by the rows of a token, kept as quotient and remainder: no divider here.
        row = wire(m, plan.row + self._remainder)
        carry = wire(m, row >= plan.dim_rows)
        unit = plan.unit + self._quotient + carry
        page_end = wire(m, ~record.interleaved & (self._number + 1 == record.page_codewords))
        with m.If(step):
            m.d.sync += [
                header.codewords.eq(header.codewords >> 1),
                self._number.eq(self._number + 1),
                plan.row.eq(Mux(page_end, 0, Mux(carry, row - plan.dim_rows, row))),
                plan.unit.eq(Mux(page_end, 0, unit)),
                # Once set it stays: behind the page of K comes only that of V.
                plan.value.eq(plan.value | page_end),
                plan.part.eq(plan.part + 1),
            ]
            with m.If(row_end):
                m.d.sync += [plan.part.eq(0), plan.channel.eq(plan.channel + 1)]
                m.d.sync += header.rows.eq(header.rows >> 1)
        return step & last
