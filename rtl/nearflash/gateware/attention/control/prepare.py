"""Prepare: from the index of a descriptor to a head that can be worked on.

    index ─► BurstReader ─► descriptor ─► DescriptorCheck
                  └───────► QueryBuffer ─┬─► DimKeys ─► DimSelector ─► mask ─► o_mask
                                         └─► QueryWriter ─► query rows
                                                  └──────► ScaleCorrection ─► scales

Contract: heads leave in the order of their indices. A head gets a context when its channels are chosen; then its
record, query rows and scales are broadcast, its plan leaves on o, and, unless it is dense or has faults, on o_scan. In
builds with `mask_beats` such a head takes its lines of the selection's store on o_lines before its record. Its
selected channels leave on o_mask ahead of its plan. A head with a bad descriptor (fault DESCRIPTOR) or an infinity or a
NaN in q (NONFINITE) leaves as a plan with that fault. After `expired` nothing leaves on o_scan and o_mask.

Timing: about 940 cycles and two memory latencies a head of d = 128, g = 4; back-pressure: yes.
Numerics: docs/contracts/attention.md, "Channels" and "Logit".
Limits: a 64-bit port.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.descriptor import DESCRIPTOR_BYTES, Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.check import DESCRIPTOR, DescriptorCheck
from nearflash.gateware.attention.control.correction import ScaleCorrection
from nearflash.gateware.attention.control.dim_keys import DimKeys
from nearflash.gateware.attention.control.dim_selector import DimSelector
from nearflash.gateware.attention.control.entry_ring import LineTake
from nearflash.gateware.attention.control.interfaces import HeadPlan, ScanPlan
from nearflash.gateware.attention.control.query import QueryBuffer
from nearflash.gateware.attention.control.rows import QueryWriter
from nearflash.gateware.attention.engine.interfaces import (
    CONTEXT_BITS,
    FAULT_BITS,
    HEAD_BITS,
    ContextRecord,
    MaskBeat,
    ScaleWrite,
    query_write,
)
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.transfer import BusError

__all__ = ["Prepare"]

_BEAT_BYTES = 8
_DESCRIPTOR_BEATS = DESCRIPTOR_BYTES // _BEAT_BYTES


class Prepare(wiring.Component):
    """Prepares one head at a time.

    Parameters
    ----------
    config : build configuration; its port must be 64 bits wide.

    Members
    -------
    descriptors_address : In, of descriptor 0. contexts : In, contexts in use. expired : In, the watchdog has struck.
    i : In stream of descriptor indices, 32 bits. i_context : In stream of free contexts.
    record_valid, record : Out, broadcast of ContextRecord.
    query_valid, query : Out, broadcast of query_write(config.heads_per_beat).
    scale_valid, scale : Out, broadcast of ScaleWrite.
    o_lines : Out stream of LineTake; with `mask_beats` only.
    o : Out stream of HeadPlan. o_scan : Out stream of ScanPlan. o_mask : Out stream of MaskBeat.
    bus : Out Axi4ReadSignature. clear : In, forgets `error`. error : Out BusError.
    idle : Out, no head is in preparation.

    Raises
    ------
    ValueError : the port is not 64 bits wide.
    """

    def __init__(self, config: AttendConfig) -> None:
        if config.port_bits != 8 * _BEAT_BYTES:
            raise ValueError(f"port_bits must be 64, not {config.port_bits!r}")
        self.config = config
        super().__init__(
            {
                **({"o_lines": Out(stream.Signature(LineTake))} if config.mask_beats else {}),
                "descriptors_address": In(64),
                "contexts": In(CONTEXT_BITS + 1),
                "expired": In(1),
                "i": In(stream.Signature(32)),
                "i_context": In(stream.Signature(CONTEXT_BITS)),
                "record_valid": Out(1),
                "record": Out(ContextRecord),
                "query_valid": Out(1),
                "query": Out(query_write(config.heads_per_beat)),
                "scale_valid": Out(1),
                "scale": Out(ScaleWrite),
                "o": Out(stream.Signature(HeadPlan)),
                "o_scan": Out(stream.Signature(ScanPlan)),
                "o_mask": Out(stream.Signature(MaskBeat)),
                "bus": Out(Axi4ReadSignature(64)),
                "clear": In(1),
                "error": Out(BusError),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Units and their wires; then the states of a head."""
        m = Module()
        m.submodules.reader = self._reader = BurstReader(64, max_outstanding=4, max_burst_bytes=512)
        m.submodules.check = self._check = DescriptorCheck(self.config)
        m.submodules.buffer = self._buffer = QueryBuffer(self.config.heads_per_beat)
        self._descriptor, self._index = Signal(DESCRIPTOR), Signal(32)
        self._context, self._faults = Signal(CONTEXT_BITS), Signal(FAULT_BITS)
        self._dense = (self._descriptor.mode & Mode.DENSE) != 0
        self._base = Signal(12)
        wiring.connect(m, self._reader.bus, wiring.flipped(self.bus))
        m.d.comb += [
            self._reader.clear.eq(self.clear),
            self.error.eq(self._reader.error),
            self._check.descriptor.eq(self._descriptor),
            self._check.contexts.eq(self.contexts),
        ]
        writing = Signal()
        self._use_query(m, writing)
        self._plan(m)
        self._states(m, writing)
        return m

    def _use_query(self, m: Module, writing: Signal) -> None:
        """Connect the users of the query buffer: keys and mask in one walk, rows and scales in the other."""
        buffer, one, derived = self._buffer, self._descriptor, self._check.derived
        m.submodules.keys = keys = DimKeys()
        m.submodules.selector = selector = DimSelector()
        m.submodules.writer = writer = QueryWriter(self.config.heads_per_beat)
        m.submodules.correction = correction = ScaleCorrection()
        self._writer = writer
        self._masked, self._scaled = Signal(), Signal()
        last_head = Signal(HEAD_BITS)  # of the descriptor, a cycle behind it
        m.d.sync += last_head.eq(one.group - 1)
        moves = selector.o.valid & selector.o.ready
        m.d.comb += [
            self.o_mask.payload.eq(selector.o.payload),
            self.o_mask.valid.eq(selector.o.valid & ~self.expired),
            # After the watchdog no walker takes masks: they are dropped, so that the head's states go on.
            selector.o.ready.eq(self.o_mask.ready | self.expired),
            buffer.dim_rows.eq(derived.dim_rows),
            buffer.group.eq(one.group),
            buffer.i.payload.eq(self._reader.o.payload),
            keys.i.eq(buffer.o),
            keys.i.valid.eq(buffer.o.valid & ~writing),
            selector.i.payload.eq(keys.o),
            selector.i.valid.eq(keys.o_valid),
            selector.count.eq(one.score_dims),
            writer.mask.eq(self.o_mask.payload),
            writer.mask_valid.eq(moves),
            writer.dense.eq(self._dense),
            writer.base.eq(self._base),
            writer.i.eq(buffer.o),
            writer.i.valid.eq(buffer.o.valid & writing),
            correction.scale.eq(one.scale),
            correction.i.eq(writer.o),
            correction.i_valid.eq(writer.o_valid & ~self._dense),
            self.query_valid.eq(writer.query_valid),
            self.query.eq(writer.query),
            self.scale_valid.eq(correction.o_valid),
            self.scale.context.eq(self._context),
            self.scale.head.eq(correction.o.head),
            self.scale.scale.eq(correction.o.scale),
            self._masked.eq(moves & self.o_mask.payload.last),
            self._scaled.eq(correction.o_valid & (correction.o.head == last_head)),
        ]

    def _plan(self, m: Module) -> None:
        """The context's record and the head's plan, from the descriptor and what follows from it."""
        one, derived, context = self._descriptor, self._check.derived, self._context
        page, fixed = (one.mode & Mode.PAGE) != 0, (one.mode & Mode.REFERENCE) != 0
        m.d.sync += self._base.eq(context << derived.base_shift)
        self._fill(m, self.record, derived, {
            "context": context, "page_tag": Cat(one.sequence, one.layer, one.head), "query_base": self._base,
            "group": one.group, "group_tokens": one.group_tokens, "interleaved": one.interleaved,
            "block_tokens": one.block_tokens, "index_format": one.index_format, "tokens": one.tokens,
            "scale": one.scale, "page_mode": page,
        })  # fmt: skip
        plan = self.o.payload
        self._fill(m, plan.scan, derived, {"context": context, "index_table": one.index_table_address})
        m.d.comb += [self.o_scan.payload.eq(plan.scan)]
        references = Cat(one[f"reference_{head}"][:12] for head in range(8))
        self._fill(m, plan.token, derived, {
            "token_table": one.token_table_address, "tokens": one.tokens, "group_tokens": one.group_tokens,
            "interleaved": one.interleaved, "dense": self._dense, "page_mode": page, "fixed": fixed,
            "references": references,
        })  # fmt: skip
        self._fill(m, plan.select, derived, {
            "context": context, "group": one.group, "tokens": one.tokens, "mass": one.top_p,
            "budget": Mux(one.top_k < derived.entries, one.top_k, derived.entries),
            "probability": (one.mode & Mode.PROBABILITY) != 0,
        })  # fmt: skip
        self._fill(m, plan.finish, derived, {
            "context": context, "index": self._index, "group": one.group, "v_mean_address": one.v_mean_address,
            "out_address": one.out_address, "faults": self._faults,
            "entries": Mux(self._faults == Fault.DESCRIPTOR, 0, derived.entries), "drain": 0, "slot": 0, "weighed": 0,
            "pages": 0,
        })  # fmt: skip

    @staticmethod
    def _fill(m: Module, target: Any, derived: Any, values: dict[str, Any]) -> None:
        """Every member from `values`, else from the member of that name of `derived`."""
        for name, _ in data.Layout.cast(target.shape()):
            m.d.comb += Value.cast(target[name]).eq(values[name] if name in values else derived[name])

    def _states(self, m: Module, writing: Signal) -> None:
        with m.FSM():
            self._load(m)
            self._place(m, writing)

    def _load(self, m: Module) -> None:
        """States until the descriptor is checked, q is loaded and its dims are selected."""
        reader, check, buffer = self._reader, self._check, self._buffer
        one, command, beat = self._descriptor, self._reader.i_command, Signal(range(_DESCRIPTOR_BEATS))
        offset = self.i.payload << DESCRIPTOR_BYTES.bit_length() - 1
        m.d.comb += [
            command.payload.address.eq(self.descriptors_address + offset),
            command.payload.beats.eq(_DESCRIPTOR_BEATS),
        ]
        with m.State("WAIT-INDEX"):
            m.d.comb += [command.valid.eq(self.i.valid), self.i.ready.eq(command.ready)]
            m.d.comb += self.idle.eq(~self.i.valid)
            m.d.sync += [self._index.eq(self.i.payload), self._faults.eq(0), beat.eq(0)]
            with m.If(self.i.valid & command.ready):
                m.next = "READ-DESCRIPTOR"
        with m.State("READ-DESCRIPTOR"):
            m.d.comb += reader.o.ready.eq(1)
            with m.If(reader.o.valid):
                m.d.sync += [one.as_value().word_select(beat, 64).eq(reader.o.payload), beat.eq(beat + 1)]
                with m.If(beat == _DESCRIPTOR_BEATS - 1):
                    m.next = "CHECK"
        with m.State("CHECK"):
            m.d.sync += beat.eq(beat + 1)
            # `beat` has wrapped to 0 with the last beat. What is derived from it stands SETTLE cycles later.
            with m.If(beat == check.SETTLE):
                m.d.comb += check.start.eq(1)
                m.next = "REQUEST-QUERY"
                self._refuse(m, check.bad_field, Fault.DESCRIPTOR)
        with m.State("REQUEST-QUERY"):
            m.d.comb += [command.valid.eq(1), buffer.load.eq(command.ready)]
            m.d.comb += command.payload.address.eq(one.q_address)
            m.d.comb += command.payload.beats.eq(buffer.rows)
            with m.If(command.ready):
                m.next = "LOAD-QUERY"
        with m.State("LOAD-QUERY"):
            m.d.comb += [buffer.i.valid.eq(reader.o.valid), reader.o.ready.eq(buffer.i.ready)]
            with m.If(~buffer.busy & check.done):
                m.d.comb += [buffer.walk.eq(~self._dense), self._writer.begin.eq(1)]
                m.next = "SELECT-DIMS"
                with m.If(self._dense):
                    m.next = "TAKE-CONTEXT"
                # The later one wins: q of a bad descriptor need not be the head's, and may well hold a NaN.
                self._refuse(m, buffer.nonfinite, Fault.NONFINITE)
                self._refuse(m, check.bad, Fault.DESCRIPTOR)
        with m.State("SELECT-DIMS"):
            with m.If(self._masked):
                m.next = "TAKE-CONTEXT"

    def _place(self, m: Module, writing: Signal) -> None:
        """States from a free context to the plans that leave; a refused head goes straight to its plan."""
        buffer = self._buffer
        with m.State("TAKE-CONTEXT"):
            m.d.comb += self.i_context.ready.eq(1)
            m.d.sync += self._context.eq(self.i_context.payload)
            with m.If(self.i_context.valid):
                m.next = "SET-BASE"
        # The base is a register behind the context; record and query rows need it.
        with m.State("SET-BASE"):
            m.next = "TAKE-LINES" if self.config.mask_beats else "BROADCAST"
            with m.If(self._faults != 0):
                m.next = "PLAN"
        if self.config.mask_beats:
            with m.State("TAKE-LINES"):
                take = self.o_lines
                m.d.comb += [
                    take.payload.eq(Cat(self._context, self._check.lines)),
                    # After the watchdog nothing is scanned: no head waits for lines.
                    take.valid.eq(~self._dense & ~self.expired),
                ]
                with m.If(take.ready | ~take.valid):
                    m.next = "BROADCAST"
        with m.State("BROADCAST"):
            m.d.comb += [self.record_valid.eq(1), buffer.walk.eq(1), buffer.write.eq(1)]
            m.next = "WRITE-QUERY"
        with m.State("WRITE-QUERY"):
            m.d.comb += writing.eq(1)
            # A dense head has no scales to wait for: its last query row has to be out.
            with m.If(Mux(self._dense, ~buffer.busy & ~self.query_valid, self._scaled)):
                m.next = "PLAN"
        with m.State("PLAN"):
            m.d.comb += self.o.valid.eq(1)
            with m.If(self.o.ready):
                m.next = "SCAN"
                with m.If(self._dense | (self._faults != 0)):
                    m.next = "WAIT-INDEX"
        # Only when the plan is in the context table: ends of this scan's walk find their record.
        with m.State("SCAN"):
            m.d.comb += self.o_scan.valid.eq(~self.expired)
            with m.If(self.o_scan.ready | self.expired):
                m.next = "WAIT-INDEX"

    def _refuse(self, m: Module, bad: Signal, fault: Fault) -> None:
        with m.If(bad):
            m.d.sync += self._faults.eq(fault)
            m.d.comb += self._buffer.walk.eq(0)
            m.next = "TAKE-CONTEXT"
