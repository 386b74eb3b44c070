"""PageScorer: approximate scores to entries of the selection, a row of four tokens of one query head a cycle.

    i ─┬─► 4 x ToLogit ─┬─► 4 x Exp2 ─► row queue ─┬─► RunSum ─► o
       │                └─► maximum ─┐             │
       └─► EntryAddress ─────────────┴─► run queue ┘

A *run* is what gives one line of entries: in page selection the rows of one query head and KV page group, one entry; in
token selection a single row, four entries. Rows wait in their queue until their run's maximum is known. Other orders
pass in sequence with the scores, each a run of its own, so that what a LOAD finds includes all scores before it; they
may not come within a run.

Timing: one row a cycle; back-pressure: on `i`; `o` is free-running.
Numerics: equals nearflash.model.attention.numerics.logit.to_logit and nearflash.model.attention.select.entries.
Limits: the entries of a context must fit its share of the store, or they reach into another's.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import LOGIT_LSB, MAX_LOGIT_BITS
from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, HEAD_BITS, ContextRecord, ScaleWrite, ScoreRow
from nearflash.gateware.attention.numerics.exp2 import Exp2
from nearflash.gateware.attention.numerics.logit import ToLogit
from nearflash.gateware.attention.select.address import EntryAddress
from nearflash.gateware.attention.select.entry import FRACTION_BITS, EntryRow, Order, ScoreItem, base_write
from nearflash.gateware.attention.select.helpers import larger, strobe
from nearflash.gateware.attention.select.keystore import LANES
from nearflash.gateware.attention.select.runsum import RUN_ROW, RunSum
from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.stream.credit import CreditPipeline
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["PageScorer"]

_QUEUE_ROWS = 32
"""The longest run, 16 rows, and what comes until its sum has begun."""
_LOGIT_CYCLE = 1 + ToLogit.LATENCY
_ROW_CYCLE = _LOGIT_CYCLE + Exp2.LATENCY
_LEAST = -(1 << MAX_LOGIT_BITS - 1)


class PageScorer(wiring.Component):
    """From scores to entries.

    Parameters
    ----------
    contexts : a power of two. lines : of four entries, in the store; a power of two. taken : heads take their lines.

    Members
    -------
    i_context : In, {valid, record}; i_scale : In, {valid, write}: broadcasts.
    contexts_log2 : In, contexts in use as a power of two, constant.
    i_base : In, as EntryAddress has it.
    i : In stream of ScoreItem.
    o : Out, EntryRow; valid : Out, in the cycles in which it is one.
    """

    def __init__(self, contexts: int, lines: int, *, taken: bool = False) -> None:
        self._contexts, self._taken = contexts, taken
        self._address = EntryAddress(contexts, lines, taken=taken)
        base: dict[str, Any] = {"i_base": In(base_write(lines))} if taken else {}
        self._run = data.StructLayout(
            {
                "x_max": signed(MAX_LOGIT_BITS),
                "outside": 1,
                "order": Order,
                "context": CONTEXT_BITS,
                "head": HEAD_BITS,
                "page": 1,
                "line": range(lines),
                "lane": 2,
                "size_log2": 3,
            }
        )
        super().__init__(
            {
                **base,
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "i_scale": In(data.StructLayout({"valid": 1, "write": ScaleWrite})),
                "contexts_log2": In(range(CONTEXT_BITS + 1)),
                "i": In(stream.Signature(ScoreItem)),
                "o": Out(EntryRow),
                "valid": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycles count from `i`."""
        m = Module()
        m.submodules.rows = rows = CreditPipeline(_ROW_CYCLE, ScoreItem, RUN_ROW, depth=_QUEUE_ROWS)
        m.submodules.runs = runs = StreamQueue(self._run, _QUEUE_ROWS)
        m.submodules.address = address = self._address
        wiring.connect(m, wiring.flipped(self.i), rows.i)
        if self._taken:
            m.d.comb += address.i_base.eq(self.i_base)
        item = rows.core_i
        scores = wire(m, item.order == Order.SCORE)
        m.d.comb += [
            address.i_context.eq(self.i_context),
            address.contexts_log2.eq(self.contexts_log2),
            Cat(address.context, address.head, address.row).eq(Cat(item.row.context, item.row.head, item.row.row)),
        ]
        page = wire(m, address.page & register(m, scores))
        last = wire(m, ~page | register(m, item.row.last))
        valid = delay(m, item.row.valid & scores.replicate(LANES), _LOGIT_CYCLE)
        logits, outside = self._logits(m, item.row)
        for lane, logit in enumerate(logits):
            m.submodules[f"exp2_{lane}"] = exp2 = Exp2()
            m.d.comb += [
                exp2.i.eq(logit[:-LOGIT_LSB]),
                rows.core_o.significand[lane].eq(exp2.o),
                rows.core_o.x[lane].eq(delay(m, logit >> (-LOGIT_LSB - FRACTION_BITS), Exp2.LATENCY)),
            ]
        m.d.comb += [
            rows.core_o.valid.eq(delay(m, valid, Exp2.LATENCY)),
            rows.core_o.last.eq(delay(m, last, _ROW_CYCLE - 1)),
        ]
        moves = strobe(m, rows.core_valid, _ROW_CYCLE)
        self._maximum(m, runs.i.payload, moves[-2], delay(m, last, _ROW_CYCLE - 2), logits, valid & outside, valid)

        late, run = _ROW_CYCLE - EntryAddress.LATENCY, runs.i.payload
        m.d.comb += [
            runs.i.valid.eq(moves[-1] & rows.core_o.last),
            run.order.eq(delay(m, item.order, _ROW_CYCLE)),
            run.context.eq(delay(m, item.row.context, _ROW_CYCLE)),
            run.head.eq(delay(m, item.row.head, _ROW_CYCLE)),
            run.page.eq(delay(m, page, _ROW_CYCLE - 1)),
            run.line.eq(delay(m, address.line, late)),
            run.lane.eq(delay(m, address.lane, late)),
            run.size_log2.eq(delay(m, address.size_log2, late)),
        ]
        self._sum(m, rows.o, runs.o)
        return m

    def _logits(self, m: Module, row: ScoreRow) -> tuple[list[Value], Value]:
        """Logits and whether they are outside their range, in cycle _LOGIT_CYCLE."""
        m.submodules.scales = scales = Memory(shape=32, depth=self._contexts << HEAD_BITS, init=[])
        write, read, scale = scales.write_port(), scales.read_port(), self.i_scale.write
        m.d.comb += [
            write.addr.eq(Cat(scale.head, scale.context)),
            write.data.eq(scale.scale),
            write.en.eq(self.i_scale.valid),
            read.addr.eq(Cat(row.head, row.context)),
        ]
        units = []
        for lane in range(LANES):
            unit = m.submodules[f"logit_{lane}"] = ToLogit()
            m.d.comb += [unit.i.eq(register(m, row.scores[lane])), unit.scale.eq(read.data)]
            units.append(unit)
        return [unit.o for unit in units], Cat(unit.outside for unit in units)

    def _maximum(
        self, m: Module, run: data.View, moves: Value, last: Value, logits: list[Value], outside: Value, valid: Value
    ) -> None:
        """Update the run's maximum in cycle _ROW_CYCLE, three cycles after the logits; the last one with state."""
        # A lane without a score must not raise the maximum.
        x = [Mux(bit, logit >> (-LOGIT_LSB - FRACTION_BITS), _LEAST) for logit, bit in zip(logits, valid, strict=True)]
        pairs = [register(m, larger(m, x[0], x[1])), register(m, larger(m, x[2], x[3]))]
        row = delay(m, larger(m, *pairs), _ROW_CYCLE - 2 - _LOGIT_CYCLE)
        bad = delay(m, outside.any(), _ROW_CYCLE - 1 - _LOGIT_CYCLE)
        # The very first row begins a run: there is none before it that could have ended.
        first, risen = Signal(init=1), larger(m, row, run.x_max)
        with m.If(moves):
            m.d.sync += [
                first.eq(last),
                run.x_max.eq(Mux(first, row, risen)),
                run.outside.eq(bad | (run.outside & ~first)),
            ]

    def _sum(self, m: Module, rows: stream.Interface, runs: stream.Interface) -> None:
        """From the queues to the output."""
        m.submodules.sum = unit = RunSum()
        run, o = runs.payload, self.o
        takes = wire(m, rows.valid & runs.valid)
        ends = wire(m, takes & rows.payload.last)
        # Rows wait: the sum needs the run's maximum, which stands with its last row alone.
        m.d.comb += [rows.ready.eq(runs.valid), runs.ready.eq(ends)]
        m.d.comb += [unit.i.eq(rows.payload), unit.valid.eq(takes)]
        m.d.comb += [getattr(unit, name).eq(run[name]) for name in ("x_max", "page", "lane", "size_log2")]
        m.d.comb += [self.valid.eq(strobe(m, ends, RunSum.LATENCY)[-1]), o.entries.eq(unit.entries)]
        m.d.comb += [o.mask.eq(unit.mask), o.address.eq(delay(m, run.line, RunSum.LATENCY))]
        m.d.comb += o.top.eq(delay(m, run.x_max >> FRACTION_BITS, RunSum.LATENCY))
        for name in ("order", "context", "head", "outside"):
            m.d.comb += o[name].eq(delay(m, run[name], RunSum.LATENCY))
