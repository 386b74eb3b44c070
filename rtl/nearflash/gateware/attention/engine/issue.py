"""Issue: decides what the lanes do in each cycle, so that nothing behind it ever has to stop.

    drains ───────────────────────────┐
    values of V, once weights are in ─┼─► current beat ─► turns (and halves) ─► o
    all other beats ──────────────────┘

Contract: every source in its own order; drains first, then K that is gathered (the lanes then have V to do while V
comes in), then V, then the rest. A beat is held for ceil(g/G) cycles, one
for each set of heads. A token of K is begun only when its score sets and its weights have places reserved; a token of V
only when its weights are there, and so late that no sum is read before it was written back. Rows of an int8 or int4
index wait for the factors that come from their aux beat; a beat of theirs takes two halves. A row's first aux beat
takes G parts, one for each head of a set.

Timing: latency LATENCY cycles; one operation a cycle; back-pressure: yes, on the inputs only.
"""

from dataclasses import dataclass
from typing import Any, Self

from amaranth import Array, Cat, Module, Mux, Signal
from amaranth.hdl import Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.pages import IndexFormat
from nearflash.gateware.attention.engine.beats import TICKET_BITS, ElementBeat, Op, OpKind, TicketRecord, What
from nearflash.gateware.attention.engine.interfaces import SLOT_BITS, RequestKind
from nearflash.gateware.fp.pipeline import register, wire
from nearflash.gateware.stream.skid import SkidBuffer

__all__ = ["EVENTS", "SET_PLACES", "Issue", "MemoryRead"]

SET_PLACES = 32
"""Score sets that may wait for their weights."""
_GROUP_MAX = 8
_SUM_GAP = 5  # from token to token of V
_FACTOR_GAP = 12  # from an aux beat to its row
EVENTS = data.StructLayout({"lane_cycle": 1, "beat_used": 1, "wait_data": 1, "wait_score": 1})


class MemoryRead(data.Struct):
    """A drain's read of a row of sums or scores."""

    address: 12
    element: 6
    fresh: 1


@dataclass(frozen=True)
class _Held:
    """Registers of the beat, or of the drain's read, that is held for its turns."""

    valid: Signal
    kind: Any
    beat: Any
    turn: Signal
    last_turn: Signal
    offset: Signal
    dim_rows: Signal
    query: Signal
    place: Signal
    read: Any
    slot: Signal
    tail: Signal
    group: Signal
    limit_shift: Signal
    halves: Signal
    half: Signal
    entry: Signal
    form: Signal

    @classmethod
    def signals(cls, heads: int) -> Self:
        """Registers for `heads` query heads a cycle."""
        shapes = {
            "valid": 1, "kind": OpKind, "beat": ElementBeat, "turn": 3, "last_turn": 3, "offset": 9, "dim_rows": 7,
            "query": 12, "place": 12, "read": MemoryRead, "slot": SLOT_BITS, "tail": 1, "group": 4, "limit_shift": 4,
            "halves": range(max(2, heads)), "half": range(max(2, heads)), "entry": 4, "form": 2,
        }  # fmt: skip
        return cls(**{name: Signal(shape, name=f"held_{name}") for name, shape in shapes.items()})


class Issue(wiring.Component):
    """The only place that stalls.

    Parameters: heads (G), slots, slot_rows (rows of sums of a slot, a power of two), weights (places of the weight
    memory, a power of two).
    Members
    -------
    i : In stream of ElementBeat: all but V. i_value : In stream of ElementBeat: VALUE, and END of GATHER requests.
    i_sums, i_scores : In streams of MemoryRead.
    o_ticket : Out; record : In, TicketRecord of that ticket, combinational.
    token : In, the weights of one more token are there. set_taken : In, one more score set has left its queue.
    renew : In, {valid, slot}: the slot's sums count as zero.
    o : Out, {valid, op}. fresh : Out, a bit for each slot: no token of V is in. events : Out, EVENTS.
    """

    #: Cycles from a beat moving in to its first operation.
    LATENCY = 2

    def __init__(self, heads: int, slots: int, slot_rows: int, weights: int) -> None:
        self._heads, self._slots, self._slot_rows, self._weights = heads, slots, slot_rows, weights
        super().__init__(
            {
                "i": In(stream.Signature(ElementBeat)),
                "i_value": In(stream.Signature(ElementBeat)),
                "i_sums": In(stream.Signature(MemoryRead)),
                "i_scores": In(stream.Signature(MemoryRead)),
                "o_ticket": Out(TICKET_BITS),
                "record": In(TicketRecord),
                "token": In(1),
                "set_taken": In(1),
                "renew": In(data.StructLayout({"valid": 1, "slot": SLOT_BITS})),
                "o": Out(data.StructLayout({"valid": 1, "op": Op})),
                "fresh": Out(slots, init=(1 << slots) - 1),
                "events": Out(EVENTS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: choose a beat. Cycle 1: one operation a turn."""
        m = Module()
        free = Signal()
        drain = self._drain(m, free)
        beat, is_value, allowed = self._candidates(m)
        load_drain, place = wire(m, free & drain.valid), wire(m, free & ~drain.valid)
        load_value = wire(m, place & is_value)
        load_other = wire(m, place & ~is_value & self.i.valid & allowed)
        load_beat = wire(m, load_value | load_other)
        m.d.comb += [self.i_value.ready.eq(load_value), self.i.ready.eq(load_other)]
        self._run(m, free, drain.payload, beat, load_beat, load_drain)
        self._credits(m, load_value, load_other)
        works = wire(m, (beat.what != What.END) & (beat.what != What.AUX))
        m.d.comb += [
            self.events.beat_used.eq(load_beat & works),
            self.events.wait_data.eq(place & ~is_value & ~self.i.valid),
            self.events.wait_score.eq(place & ~is_value & self.i.valid & ~allowed),
        ]
        return m

    def _drain(self, m: Module, free: Any) -> Any:
        """The drain's read that waits. The drains do not wait for what is decided here."""
        m.submodules.reads = reads = SkidBuffer(data.StructLayout({"kind": OpKind, "read": MemoryRead}))
        sums, scores, i = self.i_sums, self.i_scores, reads.i
        m.d.comb += [
            i.valid.eq(sums.valid | scores.valid),
            i.payload.kind.eq(Mux(sums.valid, OpKind.SUMS, OpKind.SCORES)),
            i.payload.read.eq(Mux(sums.valid, Value.cast(sums.payload), Value.cast(scores.payload))),
            sums.ready.eq(i.ready),
            scores.ready.eq(i.ready & ~sums.valid),
            reads.o.ready.eq(free),
        ]
        return reads.o

    def _candidates(self, m: Module) -> tuple[Any, Any, Any]:
        """The beat that waits, V first where it may go; whether it is of V; whether, if not, it may go."""
        beat, other, value = Signal(ElementBeat), self.i.payload, self.i_value
        self._tokens, self._gap = Signal(range(self._weights + 1)), Signal(range(_SUM_GAP + 1))
        self._places, self._sets = Signal(range(self._weights + 1)), Signal(range(SET_PLACES + 1))
        self._may_begin, self._row_gap = Signal(), Signal(range(_FACTOR_GAP + 1))
        self._value_begins = wire(m, value.payload.first & (value.payload.what == What.VALUE))
        # Two cycles behind the beginning of a token: room for three when it says so.
        scarce, room = Signal(), 3 * (_GROUP_MAX // self._heads)
        m.d.sync += scarce.eq((self._places > self._weights - room) | (self._sets > SET_PLACES - room))
        # Of what is gathered only K comes here.
        self._key_begins = wire(m, other.gather & other.first)
        waits = wire(m, self._key_begins & scarce)
        key_first = wire(m, self.i.valid & other.gather & ~waits)
        is_value = wire(m, value.valid & ~key_first & (~self._value_begins | self._may_begin))
        m.d.comb += beat.eq(Mux(is_value, value.payload.as_value(), other.as_value()))
        m.d.comb += self.o_ticket.eq(beat.ticket)
        self._last_turn = wire(m, ((self.record.request.group - 1) >> (self._heads - 1).bit_length())[:3])
        return beat, is_value, wire(m, ~waits & ((other.what != What.ROW) | (self._row_gap == 0)))

    def _run(self, m: Module, free: Any, drain: Any, beat: Any, load_beat: Any, load_drain: Any) -> None:
        """Hold the beat for its turns."""
        held = _Held.signals(self._heads)
        final = wire(m, held.turn == held.last_turn)
        # A beat moves in with the last turn of the one before: the lanes have no gap.
        m.d.comb += free.eq(~held.valid | (final & (held.half == held.halves)))
        with m.If(free):
            self._load(m, held, drain, beat, load_beat, load_drain)
        with m.Elif(final):
            m.d.sync += [held.turn.eq(0), held.offset.eq(0), held.half.eq(held.half + 1)]
        with m.Else():
            m.d.sync += [held.turn.eq(held.turn + 1), held.offset.eq(held.offset + held.dim_rows)]
        rows = self._rows(m, free, beat, load_beat)
        self._drive(m, held, final, rows)
        kind = held.kind
        m.d.comb += self.events.lane_cycle.eq(
            held.valid & ((kind == OpKind.KEY) | (kind == OpKind.VALUE) | (kind == OpKind.ROW))
        )
        self._value_done = wire(m, held.valid & final & held.beat.last & (kind == OpKind.VALUE))
        self._held_turns = wire(m, held.last_turn + 1)
        with m.If(self._value_done):
            m.d.sync += self.fresh.bit_select(held.slot, 1).eq(0)
        with m.If(self.renew.valid):
            m.d.sync += self.fresh.bit_select(self.renew.slot, 1).eq(1)

    def _load(self, m: Module, held: "_Held", drain: Any, beat: Any, load_beat: Any, load_drain: Any) -> None:
        """The next beat or read moves in, with what its request says of it."""
        record, request = self.record, self.record.request
        row = Mux((beat.what == What.AUX) | (beat.what == What.ROW), beat.channel >> 2, beat.row)
        m.d.sync += [
            held.half.eq(0),
            held.halves.eq(0),
            held.entry.eq(record.entry),
            held.form.eq(request.index_format),
            held.valid.eq(load_beat | load_drain),
            held.turn.eq(0),
            held.offset.eq(0),
            held.beat.eq(beat),
            held.last_turn.eq(Mux((beat.what == What.END) | load_drain, 0, self._last_turn)),
            held.kind.eq(Mux(load_drain, drain.kind, beat.what)),
            held.read.eq(drain.read),
            held.slot.eq(record.slot),
            held.dim_rows.eq(request.dim_rows),
            held.query.eq(request.query_base + row),
            held.place.eq((record.slot << (self._slot_rows - 1).bit_length()) + beat.row),
            held.tail.eq(request.kind == RequestKind.TAIL),
            held.group.eq(request.group),
            held.limit_shift.eq(request.limit_shift),
        ]
        with m.If(~load_drain & (beat.what == What.ROW)):
            m.d.sync += held.halves.eq(request.index_format != IndexFormat.FP16)
        with m.If(~load_drain & (beat.what == What.AUX) & beat.first):
            m.d.sync += held.halves.eq(self._heads - 1)

    def _drive(self, m: Module, held: "_Held", final: Any, rows: Any) -> None:
        """The operation of this cycle's turn."""
        op, kind, form = self.o.op, held.kind, held.form
        is_read = wire(m, (kind == OpKind.SUMS) | (kind == OpKind.SCORES))
        fresh = wire(m, Array(self.fresh)[held.slot])
        head = wire(m, held.turn << (self._heads - 1).bit_length())
        self._reading = Signal(range(self._weights))  # place of the weights of the oldest token
        m.d.sync += [
            self.o.valid.eq(held.valid),
            *(op[name].eq(held.beat[name]) for name in ("ticket", "data", "first", "last")),
            *(op[name].eq(getattr(held, name)) for name in ("kind", "turn", "tail", "entry", "form", "limit_shift")),
            op.final.eq(final),
            op.lane.eq(held.beat.channel[:2]),
            op.token.eq(Mux(is_read, held.read.element, held.beat.token)),
            op.heads.eq(Cat(head + k < held.group for k in range(self._heads))),
            op.query.eq(held.query + held.offset),
            op.weight.eq(self._reading + held.turn),
            op.address.eq(Mux(is_read, held.read.address, held.place + held.offset)),
            op.fresh.eq(Mux(is_read, held.read.fresh, fresh)),
            op.half.eq(Mux((kind == OpKind.ROW) & (form == IndexFormat.FP16), held.beat.row[0], held.half)),
        ]
        with m.If((kind == OpKind.ROW) | (kind == OpKind.AUX)):
            int4 = wire(m, Cat(held.half[0], held.beat.row))
            fp16_word = held.beat.row >> 1
            word = Mux(form == IndexFormat.FP16, fp16_word, Mux(form == IndexFormat.INT8, held.beat.row, int4))
            m.d.sync += [op.address.eq(word), op.fresh.eq(rows)]

    def _rows(self, m: Module, free: Any, beat: Any, load_beat: Any) -> Any:
        """Whether the row in flight is its block's first; when the next row may go."""
        aux = beat.what == What.AUX
        begun, initial = Signal(), Signal()
        with m.If(load_beat & aux & beat.first):
            m.d.sync += [begun.eq(1), initial.eq(self.record.initial & ~begun)]
        with m.If(load_beat & (beat.what == What.END) & ~beat.gather):
            m.d.sync += begun.eq(0)
        integers = wire(m, self.record.request.index_format != IndexFormat.FP16)
        with m.If(load_beat & aux & integers):
            m.d.sync += self._row_gap.eq(_FACTOR_GAP)
        with m.Elif(free & (self._row_gap != 0)):
            m.d.sync += self._row_gap.eq(self._row_gap - 1)
        return initial

    def _credits(self, m: Module, load_value: Any, load_other: Any) -> None:
        """Places of weights and score sets that are promised; tokens whose weights are there."""
        begun = register(m, load_other & self._key_begins)
        begin_value = wire(m, load_value & self._value_begins)
        promised = wire(m, Mux(begun, self._held_turns, 0))
        m.d.sync += [
            self._places.eq(self._places + promised - Mux(self._value_done, self._held_turns, 0)),
            self._sets.eq(self._sets + promised - self.set_taken),
            self._tokens.eq(self._tokens + self.token - begin_value),
        ]
        m.d.sync += self._may_begin.eq((self._tokens != 0) & (self._gap <= 1) & ~begin_value)
        with m.If(begin_value):
            m.d.sync += self._gap.eq(_SUM_GAP)
        with m.Elif(self._gap != 0):
            m.d.sync += self._gap.eq(self._gap - 1)
        with m.If(self._value_done):
            m.d.sync += self._reading.eq(self._reading + self._held_turns)
