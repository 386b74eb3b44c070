"""Dot path: from products of K to scores, and score sets of gathered tokens in a queue before the weight unit.

Timing: scores LATENCY cycles after their token's last products; free-running, places in the queue are reserved.
Numerics: num.ExactDot, num.ToScore.
"""

from amaranth import Array, Cat, Module, Mux, Signal
from amaranth.hdl import signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.fixed_point import SCORE_BITS
from nearflash.gateware.attention.engine.beats import TICKET_BITS, Op, OpKind, TicketFault, TicketRecord
from nearflash.gateware.attention.engine.interfaces import SLOT_BITS
from nearflash.gateware.attention.engine.issue import SET_PLACES
from nearflash.gateware.attention.engine.weight import score_set
from nearflash.gateware.attention.numerics.dot import ExactDot
from nearflash.gateware.attention.numerics.product import PRODUCT
from nearflash.gateware.attention.numerics.score import ToScore
from nearflash.gateware.fp.pipeline import delay, wire
from nearflash.gateware.stream.datapath import Datapath, Timed
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["DotPath", "tail_scores"]

_LANES = 4
_GROUP_MAX = 8


def tail_scores(heads: int) -> data.StructLayout:
    """Scores of one token of an unindexed suffix for one set of heads; `entry` as in TicketRecord."""
    scores = data.ArrayLayout(signed(SCORE_BITS), heads)
    return data.StructLayout({"valid": 1, "entry": 4, "token": 6, "turn": 3, "scores": scores})


class DotPath(wiring.Component):
    """G dot products side by side.

    Parameters: heads (G), slots.
    Members
    -------
    i : In, {valid, op} with its products `product`, PRODUCT, array of G·4, and `exceeds`, as Lanes gives them.
    o_ticket : Out; record : In, TicketRecord of that ticket, combinational.
    renew : In, {valid, slot}: the slot's totals count as empty.
    o : Out stream of score_set: GATHER. o_tail : Out, tail_scores: TAIL.
    o_fault : Out, TicketFault.
    """

    #: Cycles from a token's last products to its scores.
    LATENCY = ExactDot.LATENCY + ToScore.LATENCY

    def __init__(self, heads: int, slots: int) -> None:
        self._heads, self._slots = heads, slots
        super().__init__(
            {
                "i": In(data.StructLayout({"valid": 1, "op": Op})),
                "product": In(PRODUCT).array(heads * _LANES),
                "exceeds": In(heads * _LANES),
                "o_ticket": Out(TICKET_BITS),
                "record": In(TicketRecord),
                "renew": In(data.StructLayout({"valid": 1, "slot": SLOT_BITS})),
                "o": Out(stream.Signature(score_set(heads))),
                "o_tail": Out(tail_scores(heads)),
                "o_fault": Out(TicketFault),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: products. Cycle LATENCY: scores and what they belong to."""
        m = Module()
        scores, outside, exceeds = self._dots(m)
        end = Datapath(m).delay(Timed(self.i, 0), self.LATENCY)
        op, record = end.op, self.record
        done = wire(m, end.valid & op.last & (op.kind == OpKind.KEY))
        fault = wire(m, done & (Mux(op.tail, exceeds, outside) & op.heads).any())
        m.submodules.queue = queue = StreamQueue(score_set(self._heads), SET_PLACES)
        fresh = Signal(self._slots, init=-1)
        m.d.comb += [
            self.o_ticket.eq(op.ticket),
            self.o_fault.ticket.eq(op.ticket),
            self.o_fault.faults.eq(Mux(fault, Fault.SCORE_RANGE.value, 0)),
            self.o_tail.valid.eq(done & op.tail),
            *(self.o_tail[name].eq(op[name]) for name in ("token", "turn")),
            self.o_tail.entry.eq(record.entry),
            self.o_tail.scores.eq(scores),
            # Ready is not asked: Issue begins a token only where the queue has room for its sets.
            queue.i.valid.eq(done & ~op.tail),
        ]
        set_ = queue.i.payload
        m.d.comb += [
            set_.context.eq(record.request.context),
            set_.group.eq(record.request.group),
            set_.slot.eq(record.slot),
            set_.fresh.eq(Array(fresh)[record.slot]),
            set_.ticket.eq(op.ticket),
            set_.turn.eq(op.turn),
            set_.last.eq(op.final),
            set_.scores.eq(scores),
        ]
        with m.If(queue.i.valid & op.final):
            m.d.sync += fresh.bit_select(record.slot, 1).eq(0)
        # A slot's first set begins its totals; renewing wins over a set of the head before.
        with m.If(self.renew.valid):
            m.d.sync += fresh.bit_select(self.renew.slot, 1).eq(1)
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        return m

    def _dots(self, m: Module) -> tuple[Cat, Cat, Cat]:
        """Scores of all heads, whether they lie outside the format, whether a product broke the range rule."""
        scores, outside, exceeds = [], [], []
        for head in range(self._heads):
            m.submodules[f"dot_{head}"] = dot = ExactDot(sums=_GROUP_MAX // self._heads)
            m.submodules[f"score_{head}"] = score = ToScore()
            for lane in range(_LANES):
                m.d.comb += dot.products[lane].eq(self.product[head * _LANES + lane])
            m.d.comb += [
                dot.valid.eq(self.i.valid & (self.i.op.kind == OpKind.KEY)),
                dot.index.eq(self.i.op.turn),
                *(getattr(dot, name).eq(self.i.op[name]) for name in ("first", "last")),
                # ExactDot carries one bit a sum along: here it says that a product broke the range rule.
                dot.nonfinite.eq(self.exceeds.word_select(head, _LANES).any()),
                score.i.eq(dot.o),
            ]
            scores.append(score.o)
            outside.append(score.outside)
            exceeds.append(delay(m, dot.o_nonfinite, ToScore.LATENCY))
        return wire(m, Cat(scores)), wire(m, Cat(outside)), wire(m, Cat(exceeds))
