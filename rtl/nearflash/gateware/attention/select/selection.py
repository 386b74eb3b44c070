"""Selection: from the approximate scores of a context to the mask of what is gathered, and the share of mass in it.

    i ─► PageScorer ─┬─► EntryStore ─► EntryTerms ─┬─► EntryKeys ─► RadixSelector ─► o_mask
                     └─► HeadMaxima ─► o_start     └─► sums ─► o_alpha

Scores of all contexts come in as they do, and are stored as entries. A command is about one context whose scores have
all been taken. It is worked off in passes over its entries, a line of four entries of one query head a cycle:
sums of the terms (by probability only), keys, and, as the mask comes, the sums of the selected terms.

Contract: for each command one item on `o_start`, then the mask of its entries on `o_mask`, then one item a query head
on `o_alpha`. A context's heads are cleared when its record is broadcast; records come at least 16 cycles apart. With
`mask_beats` masks wait here, with their items of `o_start`, while the next command is worked off; a context has the
lines from `i_base` on, which `done` gives back.

Timing: passes · lines + RadixSelector.settled_cycles + 2 · rows + some 50 cycles a command, and some 70 a query head by
probability; lines = ceil(entries / 4) · group, passes 2 (3 by probability); back-pressure: yes.
Numerics: exact but for the score's logit and the key; equals nearflash.model.attention.select.selection.
Limits: 1 to selector_keys entries, and lines that fit the context's share of the store.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.engine.interfaces import (
    CONTEXT_BITS,
    HEAD_BITS,
    TOKEN_BITS,
    Alpha,
    ContextPulse,
    ContextRecord,
    GatherStart,
    MaskBeat,
    ScaleWrite,
    ScoreRow,
    SelectCommand,
)
from nearflash.gateware.attention.select.entries import PageScorer
from nearflash.gateware.attention.select.entry import Order, base_write, context_base, read_base
from nearflash.gateware.attention.select.feed import OrderFeed
from nearflash.gateware.attention.select.headsums import SUM_BITS, HeadSums
from nearflash.gateware.attention.select.helpers import strobe
from nearflash.gateware.attention.select.keys import EntryKeys
from nearflash.gateware.attention.select.keystore import LANES
from nearflash.gateware.attention.select.maxima import HeadMaxima
from nearflash.gateware.attention.select.reciprocal import RECIPROCAL_BITS, Reciprocal
from nearflash.gateware.attention.select.select import RadixSelector
from nearflash.gateware.attention.select.store import EntryStore
from nearflash.gateware.attention.select.terms import EntryTerms
from nearflash.gateware.attention.select.walk import StoreWalk
from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["Selection"]

_HEADS = 1 << HEAD_BITS
_SUM_CYCLE = EntryStore.LATENCY + EntryTerms.SUM_LATENCY
_NUMBER_CYCLE = EntryStore.LATENCY + EntryTerms.NUMBER_LATENCY
_SETTLE_CYCLES = 16
"""More than the stages from an address to the sums."""
_FACTOR = data.StructLayout({"reciprocal": RECIPROCAL_BITS, "length": 6})


class Selection(wiring.Component):
    """The selection of a build.

    Parameters
    ----------
    config : build configuration; of it contexts, score_entries, selector_keys, mask_beats.

    Members
    -------
    i_context : In, {valid, record}; i_scale : In, {valid, write}: broadcasts.
    contexts_log2 : In, contexts in use as a power of two, constant: the store is shared by so many.
    i : In stream of ScoreRow. i_command : In stream of SelectCommand.
    o_start : Out stream of GatherStart. o_mask : Out stream of MaskBeat. o_alpha : Out stream of Alpha.
    busy : Out, a command is being worked off.
    i_base : In, {valid, context, line}: broadcast before a context's first score; done : Out, ContextPulse: its entries
        are not needed any more. These with `mask_beats` only.
    """

    def __init__(self, config: AttendConfig) -> None:
        self._contexts, self._lines, self._keys = config.contexts, config.score_entries // LANES, config.selector_keys
        self._mask_beats = config.mask_beats
        taken: dict[str, Any] = {"i_base": In(base_write(self._lines)), "done": Out(ContextPulse)}
        super().__init__(
            {
                **(taken if config.mask_beats else {}),
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "i_scale": In(data.StructLayout({"valid": 1, "write": ScaleWrite})),
                "contexts_log2": In(range(CONTEXT_BITS + 1)),
                "i": In(stream.Signature(ScoreRow)),
                "i_command": In(stream.Signature(SelectCommand)),
                "o_start": Out(stream.Signature(GatherStart)),
                "o_mask": Out(stream.Signature(MaskBeat)),
                "o_alpha": Out(stream.Signature(Alpha)),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Scores to the store; what a pass computes; control."""
        m = Module()
        m.submodules.feed = feed = OrderFeed()
        m.submodules.scorer = scorer = PageScorer(self._contexts, self._lines, taken=self._mask_beats > 0)
        m.submodules.store = store = EntryStore(self._lines)
        m.submodules.walk = walk = StoreWalk(self._lines)
        m.submodules.selector = selector = RadixSelector(self._keys, weighted=True)
        wiring.connect(m, wiring.flipped(self.i), feed.i)
        wiring.connect(m, feed.o, scorer.i)
        command, passing = Signal(SelectCommand), _Passing()
        self._start = self._queue_starts(m) if self._mask_beats else self.o_start
        m.d.comb += [
            feed.clear.eq(Cat(self.i_context.valid, self.i_context.record.context)),
            feed.load.eq(Cat(self.i_command.valid & self.i_command.ready, self.i_command.payload.context)),
            scorer.i_context.eq(self.i_context),
            scorer.i_scale.eq(self.i_scale),
            scorer.contexts_log2.eq(self.contexts_log2),
            store.i.eq(scorer.o),
            store.write.eq(scorer.valid),
            store.address.eq(walk.address),
            walk.base.eq(self._base(m, command, scorer)),
            *(getattr(walk, name).eq(command[name]) for name in ("group", "entries", "local_entry")),
            walk.step.eq(passing.step),
            walk.rewind.eq(~passing.active),
            selector.i_command.payload.eq(Cat(command.budget, command.mass)),
        ]
        with m.If(self.i_command.ready):
            m.d.sync += command.eq(self.i_command.payload)
        loaded, outside = self._references(m, scorer)
        self._terms(m, command, passing, walk, store, selector)
        self._control(m, command, passing, walk, selector, loaded)
        m.d.comb += [
            self.busy.eq(~self.i_command.ready),
            self._start.payload.context.eq(command.context),
            self.o_alpha.payload.context.eq(command.context),
            self.o_alpha.payload.head.eq(passing.head),
            self.o_alpha.payload.faults.eq(Mux(outside, int(Fault.SCORE_RANGE), 0)),
        ]
        return m

    def _queue_starts(self, m: Module) -> stream.Interface:
        """Items of `o_start` wait as their masks do."""
        m.submodules.starts = starts = StreamQueue(GatherStart, max(2, self._contexts))
        wiring.connect(m, starts.o, wiring.flipped(self.o_start))
        return starts.i

    def _base(self, m: Module, command: data.View, scorer: PageScorer) -> Value:
        """First line of the command's context."""
        if not self._mask_beats:
            return context_base(command.context, self.contexts_log2, self._lines)
        m.d.comb += scorer.i_base.eq(self.i_base)
        return register(m, read_base(m, self.i_base, command.context, self._contexts))

    def _references(self, m: Module, scorer: PageScorer) -> tuple[Value, Value]:
        """The answers to a LOAD go to `o_start`. Whether the last one came; whether a logit was out of range."""
        m.submodules.maxima = maxima = HeadMaxima(self._contexts)
        m.d.comb += [maxima.i.eq(scorer.o), maxima.valid.eq(scorer.valid)]
        came = strobe(m, scorer.valid & (scorer.o.order == Order.LOAD), HeadMaxima.LATENCY)[-1]
        head, outside = delay(m, scorer.o.head, HeadMaxima.LATENCY), Signal()
        with m.If(came):
            m.d.sync += [
                self._start.payload.references[head].eq(maxima.top),
                # Collected over the heads of a LOAD; starts over with head 0.
                outside.eq(maxima.outside | (outside & (head != 0))),
            ]
        return register(m, came & head.all()), outside

    def _terms(
        self,
        m: Module,
        command: data.View,
        passing: "_Passing",
        walk: StoreWalk,
        store: EntryStore,
        selector: RadixSelector,
    ) -> None:
        """From the line that the walk is at to the sums and to the keys. Cycles count from the line's address."""
        m.submodules.terms = terms = EntryTerms()
        m.submodules.keys = keys = EntryKeys()
        m.submodules.sums = sums = HeadSums()
        m.submodules.factors = factors = Memory(shape=_FACTOR, depth=_HEADS, init=[])
        write, read = factors.write_port(), factors.read_port(domain="comb")
        m.submodules.reciprocal = reciprocal = Reciprocal(SUM_BITS)
        found = Signal(SUM_BITS)
        # Kept while the other sum is read: alpha is made of both.
        with m.If(~passing.selected):
            m.d.sync += found.eq(sums.o)
        m.d.comb += [
            reciprocal.total.eq(found),
            reciprocal.start.eq(passing.divide),
            passing.divided.eq(reciprocal.done),
            write.addr.eq(passing.head),
            write.data.eq(Cat(reciprocal.o, reciprocal.length)),
            write.en.eq(reciprocal.done),
            self.o_alpha.payload.denominator.eq(found),
            self.o_alpha.payload.numerator.eq(sums.o),
        ]
        # Cycles 1, 2: the head's constants; the line.
        head = delay(m, walk.head, EntryStore.LATENCY - 1)
        m.d.comb += [
            read.addr.eq(head),
            terms.top.eq(register(m, self._start.payload.references[head])),
            Cat(terms.reciprocal, terms.length).eq(register(m, read.data.as_value())),
            terms.probability.eq(command.probability),
            terms.i.eq(store.o),
            terms.take.eq(delay(m, Mux(passing.marks, passing.mask, walk.valid), EntryStore.LATENCY)),
        ]
        # Sums.
        adds = strobe(m, passing.step & passing.sums, _SUM_CYCLE)[-1]
        slot = delay(m, Cat(walk.head, passing.marks), _SUM_CYCLE)
        m.d.comb += [
            # One port for both: sums are read only when nothing is added (`_settle` waits for that).
            sums.slot.eq(Mux(adds, slot, Cat(passing.head, passing.selected))),
            sums.add.eq(adds),
            sums.fresh.eq(delay(m, walk.first_row, _SUM_CYCLE)),
            sums.amount.eq(terms.sum),
        ]
        # Keys.
        late, o = _NUMBER_CYCLE + keys.LATENCY, selector.i.payload
        m.d.comb += [
            keys.numbers.eq(terms.numbers),
            keys.first.eq(delay(m, walk.first_head, _NUMBER_CYCLE)),
            o.keys.eq(keys.o),
            Cat(o.local, o.valid, o.last).eq(delay(m, Cat(walk.local & walk.valid, walk.valid, walk.final), late)),
            selector.i.valid.eq(strobe(m, passing.step & passing.keys & walk.last_head, late)[-1]),
        ]

    def _marks(
        self, m: Module, command: data.View, passing: "_Passing", walk: StoreWalk, selector: RadixSelector
    ) -> tuple[Value, Value]:
        """A beat of the mask is taken with a row's first head: to `o_mask`, and kept for the other heads.

        Whether one can be taken, and whether one is.
        """
        if self._mask_beats:
            m.submodules.masks = masks = StreamQueue(MaskBeat, self._mask_beats + 1, memory="block")
        else:
            m.submodules.masks = masks = StreamQueue(MaskBeat, 4)
        wiring.connect(m, masks.o, wiring.flipped(self.o_mask))
        mask, held, selected = selector.o.payload.mask, Signal(LANES), Signal(TOKEN_BITS)
        takes = wire(m, selector.o.valid & selector.o.ready)
        m.d.comb += [
            masks.i.payload.eq(selector.o.payload),
            masks.i.valid.eq(takes),
            passing.mask.eq(Mux(walk.first_head, mask, held)),
            self.o_alpha.payload.selected.eq(selected),
        ]
        with m.If(takes):
            m.d.sync += [held.eq(mask), selected.eq(selected + sum(mask))]
        with m.If(self.i_command.ready):
            m.d.sync += selected.eq(0)
        return masks.i.ready & walk.first_head, takes

    def _control(
        self,
        m: Module,
        command: data.View,
        passing: "_Passing",
        walk: StoreWalk,
        selector: RadixSelector,
        loaded: Value,
    ) -> None:
        """Passes in turn."""
        waited = Signal(range(_SETTLE_CYCLES))
        last_head = wire(m, passing.head + 1 == command.group)
        can_take, takes = self._marks(m, command, passing, walk, selector)
        with m.FSM():
            with m.State("COMMAND"):
                m.d.comb += self.i_command.ready.eq(1)
                with m.If(self.i_command.valid):
                    m.next = "LOAD"
            with m.State("LOAD"):
                with m.If(loaded):
                    m.next = "SELECT"
                    with m.If(command.probability):
                        m.next = "SUM"
            self._sum(m, passing, walk, waited, last_head)
            self._mark(m, command, passing, walk, selector, waited, last_head, can_take, takes)

    def _sum(self, m: Module, passing: "_Passing", walk: StoreWalk, waited: Signal, last_head: Value) -> None:
        """States of the pass over all terms, and of one division a head."""
        with m.State("SUM"):
            m.d.comb += [passing.active.eq(1), passing.step.eq(1), passing.sums.eq(1)]
            with m.If(walk.final):
                m.next = "SETTLE-SUM"
        with m.State("SETTLE-SUM"):
            self._settle(m, passing, waited, "READ-SUM")
        # The sum is a register behind its head.
        with m.State("READ-SUM"):
            m.d.comb += passing.divide.eq(1)
            m.next = "DIVIDE"
        with m.State("DIVIDE"):
            with m.If(passing.divided):
                m.d.sync += passing.head.eq(passing.head + 1)
                m.next = "READ-SUM"
                with m.If(last_head):
                    m.next = "SELECT"

    def _mark(
        self,
        m: Module,
        command: data.View,
        passing: "_Passing",
        walk: StoreWalk,
        selector: RadixSelector,
        waited: Signal,
        last_head: Value,
        can_take: Value,
        takes: Value,
    ) -> None:
        """States of the passes over keys and marks, and of one alpha a head."""
        with m.State("SELECT"):
            m.d.comb += selector.i_command.valid.eq(1)
            with m.If(selector.i_command.ready):
                m.next = "KEYS"
        with m.State("KEYS"):
            m.d.comb += [passing.active.eq(1), passing.step.eq(1), passing.keys.eq(1)]
            m.d.comb += passing.sums.eq(~command.probability)
            with m.If(walk.final):
                m.next = "START"
        with m.State("START"):
            m.d.comb += self._start.valid.eq(1)
            with m.If(self._start.ready):
                m.next = "MARK"
        with m.State("MARK"):
            m.d.comb += [passing.active.eq(1), passing.sums.eq(1), passing.marks.eq(1)]
            # Only a row's first head takes a beat: the others use the one that is held.
            m.d.comb += [selector.o.ready.eq(can_take), passing.step.eq(takes | ~walk.first_head)]
            with m.If(passing.step & walk.final):
                m.next = "SETTLE-MARK"
        with m.State("SETTLE-MARK"):
            self._settle(m, passing, waited, "READ-ALL")
        # Numerator and denominator share a port: one is read in each cycle.
        with m.State("READ-ALL"):
            m.d.sync += passing.selected.eq(1)
            m.next = "ALPHA"
        with m.State("ALPHA"):
            m.d.comb += self.o_alpha.valid.eq(1)
            with m.If(self.o_alpha.ready):
                m.d.sync += [passing.head.eq(passing.head + 1), passing.selected.eq(0)]
                m.next = "READ-ALL"
                with m.If(last_head):
                    if self._mask_beats:
                        m.d.comb += self.done.eq(Cat(C(1), command.context))
                    m.next = "COMMAND"

    @staticmethod
    def _settle(m: Module, passing: "_Passing", waited: Signal, then: str) -> None:
        m.d.sync += [waited.eq(waited + 1), passing.head.eq(0)]
        with m.If(waited.all()):
            m.next = then


class _Passing:
    """State of the line that the walk is at, and of the sums between the passes."""

    def __init__(self) -> None:
        #: Within a pass; the line is worked on; its terms are summed, for all or the marked entries; it gives keys.
        self.active, self.step, self.sums, self.marks, self.keys = (Signal(name=f"pass_{k}") for k in range(5))
        self.mask = Signal(LANES)
        #: While nothing is added the sum of `head` is read, or that of its `selected` entries; it is divided by; done.
        self.head, self.selected = Signal(HEAD_BITS), Signal()
        self.divide, self.divided = Signal(), Signal()
