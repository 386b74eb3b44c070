"""Harvest of scores: reads complete scores in the order of `ScoreRow`, then gives their place back and tells it.

Contract: jobs in order; Done leaves after the job's last row has left.

Timing: one row a cycle while the lanes have a cycle free, one in four cycles of a tail, 20 cycles more a job;
back-pressure: yes.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.hdl import C, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import SCORE_BITS
from nearflash.gateware.attention.engine.blocks import BUFFER_WRITE, ScoreJob
from nearflash.gateware.attention.engine.interfaces import Done, RequestKind, ScoreRow
from nearflash.gateware.attention.engine.issue import MemoryRead
from nearflash.gateware.attention.engine.scores import TAIL_ADDRESS
from nearflash.gateware.fp.pipeline import register, wire
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["ScoreReadout"]

_PLACES = 24
_GROUP_MAX = 8
_LANES = 4


class ScoreReadout(wiring.Component):
    """Walks KV page groups, heads and rows of a job.

    Parameters: heads (G), blocks.
    Members
    -------
    i_buffer : In, BUFFER_WRITE. i : In stream of ScoreJob.
    o_read : Out stream of MemoryRead; scores : In, {valid, values}: rows that they read, in order, at most 24 behind.
    release : Out, {valid, tail, entry}. o : Out stream of ScoreRow. o_done : Out stream of Done.
    """

    def __init__(self, heads: int, blocks: int) -> None:
        self._heads, self._blocks = heads, blocks
        values = data.ArrayLayout(signed(SCORE_BITS), _LANES)
        super().__init__(
            {
                "i_buffer": In(BUFFER_WRITE),
                "i": In(stream.Signature(ScoreJob)),
                "o_read": Out(stream.Signature(MemoryRead)),
                "scores": In(data.StructLayout({"valid": 1, "values": values})),
                "release": Out(data.StructLayout({"valid": 1, "tail": 1, "entry": 4})),
                "o": Out(stream.Signature(ScoreRow)),
                "o_done": Out(stream.Signature(Done)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """First row of the job by adding, then its rows; what they are waits for the scores."""
        m = Module()
        job, first, factor, added = Signal(ScoreJob), Signal(16), Signal(9), Signal(20)
        places = Signal(range(_PLACES + 1), init=_PLACES)
        token = Signal(2)  # a tail's row takes four reads
        room = register(m, places > 1)  # a cycle late, so one is left when it says so
        read = wire(m, self.o_read.valid & self.o_read.ready)
        step = wire(m, read & (~job.tail | token.all()))
        m.d.sync += token.eq(token + (read & job.tail))
        # A place is taken with the read: the scores come later, and nothing can stop them.
        m.d.sync += places.eq(places - step + (self.o.valid & self.o.ready))
        end = Signal()
        with m.FSM():
            with m.State("WAIT-JOB"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [job.eq(self.i.payload), first.eq(0), factor.eq(self.i.payload.unit_rows)]
                m.d.sync += added.eq(self.i.payload.number)
                with m.If(self.i.valid):
                    m.next = "MULTIPLY"
            with m.State("MULTIPLY"):
                m.d.sync += [first.eq(first + Mux(factor[0], added, 0)), factor.eq(factor >> 1), added.eq(added << 1)]
                with m.If(factor == 0):
                    m.next = "READ"
            with m.State("READ"):
                m.d.comb += self.o_read.valid.eq(room)
                with m.If(step & end):
                    m.next = "WAIT-ROWS"
            with m.State("WAIT-ROWS"):
                # All rows have left: the buffer may be written by the next block from here on.
                m.d.comb += self.o_done.valid.eq(places == _PLACES)
                with m.If(self.o_done.valid & self.o_done.ready):
                    m.d.comb += self.release.valid.eq(1)
                    m.next = "WAIT-JOB"
        m.d.comb += [
            self.release.tail.eq(job.tail),
            self.release.entry.eq(job.entry),
            self.o_done.payload.context.eq(job.context),
            self.o_done.payload.kind.eq(Mux(job.tail, RequestKind.TAIL, RequestKind.INDEX)),
            self.o_done.payload.faults.eq(job.faults),
        ]
        row, head, last = self._walk(m, job, token, step, end)
        self._collect(m, job, step, wire(m, first + row), row, head, last)
        return m

    def _walk(self, m: Module, job: data.View, token: Value, step: Value, end: Signal) -> tuple[Value, Value, Value]:
        """Row in the job and head of the next read, and where they lie."""
        start, row, head = Signal(9), Signal(5), Signal(3)
        place = wire(m, start + row)
        group_end, head_end = wire(m, row + 1 == job.group_rows), wire(m, head + 1 == job.group)
        next_start = wire(m, start + job.group_rows)
        m.d.comb += end.eq(group_end & head_end & (next_start == job.unit_rows))
        with m.If(step):
            m.d.sync += row.eq(Mux(group_end, 0, row + 1))
            with m.If(group_end):
                m.d.sync += head.eq(Mux(head_end, 0, head + 1))
                with m.If(head_end):
                    m.d.sync += start.eq(Mux(end, 0, next_start))
        bits = (self._heads - 1).bit_length()
        m.submodules.buffers = buffers = Memory(shape=4, depth=self._blocks * _GROUP_MAX, init=[])
        write, read = buffers.write_port(), buffers.read_port(domain="comb")
        turn = head >> bits
        m.d.comb += [
            write.addr.eq(self.i_buffer.turn + (self.i_buffer.entry << 3)),
            write.data.eq(self.i_buffer.buffer),
            write.en.eq(self.i_buffer.valid),
            read.addr.eq(turn + (job.entry << 3)),
            self.o_read.payload.address.eq(
                Mux(job.tail, TAIL_ADDRESS | Cat(place[:4], C(0, 3) | turn, job.entry[0]), Cat(place[1:8], read.data))
            ),
            self.o_read.payload.element.eq(Cat(Mux(job.tail, token, place[0]), head[:bits])),
        ]
        return place, head, group_end

    def _collect(self, m: Module, job: Any, step: Value, number: Value, row: Value, head: Value, last: Value) -> None:
        """Rows are named when they are read, and joined with their scores."""
        names = StreamQueue(data.StructLayout({"head": 3, "row": 16, "valid": _LANES, "last": 1}), _PLACES)
        values = StreamQueue(self.scores.values.shape(), _PLACES)
        m.submodules.names, m.submodules.values = names, values
        valid = Mux(job.tail, job.rows.word_select(row[:4], _LANES), (1 << _LANES) - 1)
        o, name = self.o.payload, names.o.payload
        m.d.comb += [
            *(names.i.payload[field].eq(value) for field, value in
              {"head": head, "row": number, "valid": valid, "last": last}.items()),
            names.i.valid.eq(step),
            values.i.payload.eq(self.scores.values),
            # Ready is not asked: there are no more reads under way than places.
            values.i.valid.eq(self.scores.valid),
            self.o.valid.eq(values.o.valid),
            o.context.eq(job.context),
            *(o[field].eq(name[field]) for field in ("head", "row", "valid", "last")),
            o.scores.eq(values.o.payload),
            names.o.ready.eq(values.o.valid & self.o.ready),
            values.o.ready.eq(self.o.ready),
        ]  # fmt: skip
