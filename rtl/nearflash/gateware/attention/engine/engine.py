"""Channel engine: from checked pages to approximate scores and exact partial sums of one channel.

    i_page, i ─► BeatFilter ─┬─► queue of V ─┐
                             └───────────────┴─► Issue ─► Lanes ─┬─► DotPath ─► WeightUnit ─► weights of Lanes
                                                                 └─► Accumulators ─┬─► SumDrain ─► o_partial
                                                                                   └─► ScorePath ─► Readout ─► o_score

Everything behind Issue runs freely; places for its results are reserved before. A request holds a ticket from its
header until its END has passed the lanes; faults are collected by ticket.

Timing: one beat of fp16 a cycle and set of heads; back-pressure: yes.
Numerics: docs/contracts/attention.md, 1.
"""

from amaranth import Cat, Module, Mux
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.engine.accumulators import Accumulators
from nearflash.gateware.attention.engine.beats import ElementBeat, OpKind, What
from nearflash.gateware.attention.engine.blocks import BlockTable
from nearflash.gateware.attention.engine.dots import DotPath
from nearflash.gateware.attention.engine.drain import SumDrain
from nearflash.gateware.attention.engine.filter import BeatFilter
from nearflash.gateware.attention.engine.interfaces import (
    ContextRecord,
    Done,
    DrainCommand,
    GatherWrite,
    PageHeader,
    Partial,
    ScoreRow,
    query_write,
)
from nearflash.gateware.attention.engine.issue import EVENTS, Issue
from nearflash.gateware.attention.engine.lanes import Lanes
from nearflash.gateware.attention.engine.multiplexer import choose
from nearflash.gateware.attention.engine.requests import TicketTable
from nearflash.gateware.attention.engine.score_readout import ScoreReadout
from nearflash.gateware.attention.engine.scores import ScorePath
from nearflash.gateware.attention.engine.weight import WeightUnit
from nearflash.gateware.fp.pipeline import register, wire
from nearflash.gateware.nand.interfaces import CodewordBeat
from nearflash.gateware.stream.datapath import Datapath, Timed
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.stream.skid import SkidBuffer

__all__ = ["ChannelEngine"]

_GROUP_TOKENS_MAX = 64
_GROUP_MAX = 8
_VALUE_BEATS = 513
_READ_CYCLE = Lanes.LATENCY - 1  # of a row of sums or scores
_END_CYCLES = Lanes.LATENCY + DotPath.LATENCY + 2


class ChannelEngine(wiring.Component):
    """One channel's share of the attend kernel.

    Parameters: config, the build. A head's rows of sums, ceil(g/G)·d/4, take query_rows / contexts rows of its slot; a
    head of more rows takes the slots behind its own too.

    Members
    -------
    i_context, i_query, i_gather : In, {valid, record | row | write}: broadcasts.
    i_page : In stream of PageHeader. i : In stream of CodewordBeat.
    o_score : Out stream of ScoreRow. o_done : Out stream of Done.
    i_drain : In stream of DrainCommand, of a head whose requests are all done. o_partial : Out stream of Partial.
    events : Out, EVENTS of this cycle, to be counted.
    """

    def __init__(self, config: AttendConfig) -> None:
        self.config, self._heads = config, config.heads_per_beat
        self._slot_rows = config.query_rows // config.contexts
        self._weights = max(512, 2 * _GROUP_TOKENS_MAX * _GROUP_MAX // self._heads)
        super().__init__(
            {
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "i_query": In(data.StructLayout({"valid": 1, "row": query_write(self._heads)})),
                "i_gather": In(data.StructLayout({"valid": 1, "write": GatherWrite})),
                "i_page": In(stream.Signature(PageHeader)),
                "i": In(stream.Signature(CodewordBeat)),
                "o_score": Out(stream.Signature(ScoreRow)),
                "o_done": Out(stream.Signature(Done)),
                "i_drain": In(stream.Signature(DrainCommand)),
                "o_partial": Out(stream.Signature(Partial)),
                "events": Out(EVENTS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The parts, then what connects them."""
        m = Module()
        config, heads, slots = self.config, self._heads, self.config.gather_slots
        m.submodules.filter = self._filter = BeatFilter(config.contexts)
        m.submodules.requests = self._requests = TicketTable(config.contexts, readers=2, reporters=5)
        m.submodules.issue = self._issue = Issue(heads, slots, self._slot_rows, self._weights)
        m.submodules.lanes = self._lanes = Lanes(heads, config.query_rows, self._weights)
        m.submodules.dots = self._dots = DotPath(heads, slots)
        m.submodules.weight = self._weight = WeightUnit(heads, config.contexts, slots, self._weights)
        m.submodules.accumulators = self._accumulators = Accumulators(
            heads, slots * self._slot_rows, config.score_blocks
        )
        m.submodules.blocks = self._blocks = BlockTable(heads, config.score_blocks)
        m.submodules.scores = self._scores = ScorePath(heads, config.score_blocks)
        m.submodules.readout = self._readout = ScoreReadout(heads, config.score_blocks)
        m.submodules.drain = self._drain = SumDrain(heads, slots, self._slot_rows)
        m.d.comb += [
            self._filter.i_context.eq(self.i_context),
            self._weight.i_context.eq(self.i_context),
            self._weight.i_gather.eq(self.i_gather),
            self._requests.i_gather.eq(self.i_gather),
            self._lanes.i_query.eq(self.i_query),
            self.events.eq(self._issue.events),
        ]
        wiring.connect(m, wiring.flipped(self.i_page), self._filter.i_page)
        wiring.connect(m, wiring.flipped(self.i), self._filter.i)
        self._route(m)
        self._operate(m)
        self._accumulate(m)
        self._sum(m)
        self._score(m)
        self._end(m)
        return m

    def _route(self, m: Module) -> None:
        """Beats of V wait in a queue until their weights are there, and so does the END behind them.

        A beat moves when both ways are free, whichever it takes, so that the filter need not know which. Nothing waits
        for itself: weights come from beats that are ahead of those that wait for them.
        """
        beat, issue = self._filter.o, self._issue
        m.submodules.values = values = StreamQueue(ElementBeat, _VALUE_BEATS, memory="block")
        m.submodules.others = others = SkidBuffer(ElementBeat)  # Issue chooses late; the filter must not wait for that
        what = beat.payload.what
        late = wire(m, beat.payload.gather & ((what == What.VALUE) | (what == What.END)))
        m.d.comb += [
            values.i.payload.eq(beat.payload),
            others.i.payload.eq(beat.payload),
            values.i.valid.eq(beat.valid & late & others.i.ready),
            others.i.valid.eq(beat.valid & ~late & values.i.ready),
            beat.ready.eq(values.i.ready & others.i.ready),
        ]
        wiring.connect(m, others.o, issue.i)
        wiring.connect(m, values.o, issue.i_value)

    def _operate(self, m: Module) -> None:
        """An operation reaches each part when its operands do."""
        issued, requests, lanes, dots = self._issue.o, self._requests, self._lanes, self._dots
        path, issue, weight = Datapath(m), self._issue, self._weight
        operation = Timed(issued, 0)
        self._at = lambda cycle: path.delay(operation, cycle)
        m.d.comb += [
            lanes.i_weight.eq(weight.o_weight),
            lanes.op.eq(issued.op),
            dots.i.eq(self._at(Lanes.LATENCY)),
            dots.exceeds.eq(lanes.exceeds),
            *(product.eq(lane) for product, lane in zip(dots.product, lanes.o, strict=True)),
            requests.ticket[0].eq(issue.o_ticket),
            issue.record.eq(requests.record[0]),
            requests.ticket[1].eq(dots.o_ticket),
            dots.record.eq(requests.record[1]),
            dots.renew.eq(self._drain.renew),
            issue.token.eq(weight.o_token),
            issue.set_taken.eq(dots.o.valid & dots.o.ready),
        ]
        wiring.connect(m, dots.o, weight.i)
        checked = self._at(Lanes.NONFINITE_LATENCY)
        nonfinite = Mux(checked.valid & lanes.nonfinite, Fault.NONFINITE.value, 0)
        m.d.comb += [
            requests.fault[0].eq(self._filter.o_fault),
            requests.fault[1].eq(weight.o_fault),
            requests.fault[2].eq(dots.o_fault),
            requests.fault[3].ticket.eq(checked.op.ticket),
            requests.fault[3].faults.eq(nonfinite),
        ]

    def _accumulate(self, m: Module) -> None:
        """A row of sums or scores is read a cycle before its products are there."""
        accumulators, lanes, read = self._accumulators, self._lanes, self._at(_READ_CYCLE)
        op, row, int4 = read.op, read.op.kind == OpKind.ROW, read.op.form == IndexFormat.INT4
        halves = Cat(int4 | ~op.half[0], int4 | op.half[0])
        scores = wire(m, row | (op.kind == OpKind.SCORES))
        m.d.comb += [
            accumulators.i.address.eq(Mux(scores, self._scores.address, op.address)),
            accumulators.i.scores.eq(scores),
            accumulators.i.fresh.eq(op.fresh),
            accumulators.i.head.eq(op.token[2:]),
            accumulators.i.pair.eq(int4),
            accumulators.borrow.eq(lanes.borrow),
            *(product.eq(lane) for product, lane in zip(accumulators.product, lanes.o, strict=True)),
        ]
        with m.If(read.valid & row):
            m.d.comb += accumulators.i.write.eq(halves)
        with m.If(read.valid & (op.kind == OpKind.VALUE)):
            m.d.comb += accumulators.i.write.eq(0b11)

    def _sum(self, m: Module) -> None:
        """p·V."""
        drain, weight, cycle = self._drain, self._weight, _READ_CYCLE + Accumulators.READ_LATENCY
        seen = self._at(cycle)
        lane, is_sum = seen.op.token[:2], wire(m, seen.valid & (seen.op.kind == OpKind.SUMS))
        m.d.comb += [
            drain.sum.valid.eq(register(m, is_sum)),
            drain.sum.value.eq(register(m, choose(list(self._accumulators.o), lane)).as_signed()),
            drain.fresh.eq(self._issue.fresh),
            drain.total.eq(weight.total),
            drain.weight_busy.eq(weight.busy),
            weight.hold.eq(drain.hold),
            weight.total_address.eq(drain.total_address),
            self._issue.renew.eq(drain.renew),
        ]
        wiring.connect(m, wiring.flipped(self.i_drain), drain.i)
        wiring.connect(m, drain.o, wiring.flipped(self.o_partial))
        wiring.connect(m, drain.o_read, self._issue.i_sums)

    def _score(self, m: Module) -> None:
        """Approximate scores, of rows and of tails."""
        scores, readout, lanes, blocks = self._scores, self._readout, self._lanes, self._blocks
        checked = self._at(_READ_CYCLE + ScorePath.FAULT_LATENCY)
        fault = self._requests.fault[4]
        m.d.comb += [
            scores.i_buffer.eq(blocks.o_buffer),
            readout.i_buffer.eq(blocks.o_buffer),
            blocks.release.eq(readout.release),
            scores.i.eq(self._at(_READ_CYCLE)),
            *(product.eq(lane) for product, lane in zip(scores.product, lanes.o, strict=False)),
            *(word.eq(read) for word, read in zip(scores.words, self._accumulators.o, strict=True)),
            scores.exceeds.eq(lanes.exceeds),
            scores.i_tail.eq(self._dots.o_tail),
            lanes.i_factor.eq(scores.o_factor),
            readout.scores.eq(scores.o),
            fault.ticket.eq(checked.op.ticket),
            fault.faults.eq(Mux(scores.o_fault, Fault.SCORE_RANGE.value, 0)),
        ]
        wiring.connect(m, readout.o_read, self._issue.i_scores)
        wiring.connect(m, readout.o, wiring.flipped(self.o_score))
        wiring.connect(m, blocks.o_job, readout.i)

    def _end(self, m: Module) -> None:
        """Requests begin at the filter and end behind the last part."""
        requests, ended = self._requests, self._at(_END_CYCLES)
        m.d.comb += [
            requests.end.ticket.eq(ended.op.ticket),
            requests.end.valid.eq(ended.valid & (ended.op.kind == OpKind.END)),
        ]
        wiring.connect(m, self._filter.o_request, self._blocks.i)
        wiring.connect(m, self._blocks.o, requests.i)
        wiring.connect(m, requests.o_ended, self._blocks.i_ended)
        m.submodules.dones = dones = StreamQueue(Done, 4)
        gathered, scored = requests.o_done, self._readout.o_done
        m.d.comb += [
            dones.i.valid.eq(gathered.valid | scored.valid),
            dones.i.payload.eq(Mux(gathered.valid, gathered.payload.as_value(), scored.payload.as_value())),
            gathered.ready.eq(dones.i.ready),
            scored.ready.eq(dones.i.ready & ~gathered.valid),
        ]
        wiring.connect(m, dones.o, wiring.flipped(self.o_done))
