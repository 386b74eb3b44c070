"""Block table: which index block and which unindexed suffix keeps its scores where, and when they are complete.

Contract: every request passes from `i` to `o`, with the place of its scores: a block's first request takes a place and
a buffer for each set of heads, a TAIL request one half of the tail's buffer, and waits for it. When a block's last
request or a TAIL request has ended, its job goes out; its place is free again once `release` says so. The walker keeps
blocks within the buffers that there are.

Timing: a block's first request takes ceil(g/G) + 3 cycles, others 2; back-pressure: yes.
"""

from amaranth import Array, Cat, Module, Mux, Signal, Value
from amaranth.hdl import C
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.beats import EndedRequest, RequestRecord, TicketRecord
from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, FAULT_BITS, RequestKind
from nearflash.gateware.fp.pipeline import register, wire
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["BUFFER_WRITE", "BlockTable", "ScoreJob"]

_TAILS = 2
#: Where a block keeps a set of heads.
BUFFER_WRITE = data.StructLayout({"valid": 1, "entry": 4, "turn": 3, "buffer": 4})


class ScoreJob(data.Struct):
    """Scores that are complete."""

    context: CONTEXT_BITS
    tail: 1
    entry: 4
    group: 4
    group_rows: 5
    """Rows of four tokens of a KV page group."""
    unit_rows: 9
    """Of the block; TAIL: of the KV page group."""
    number: 20
    """Of the block; TAIL: of the KV page group."""
    rows: 64
    """TAIL: wanted tokens."""
    faults: FAULT_BITS


class BlockTable(wiring.Component):
    """Places of scores.

    Parameters: heads (G); blocks, the buffers that there are.
    Members
    -------
    i : In stream of RequestRecord. o : Out stream of TicketRecord (its slot is not filled in).
    o_buffer : Out, BUFFER_WRITE. i_ended : In stream of EndedRequest, INDEX and TAIL. o_job : Out stream of ScoreJob.
    release : In, {valid, tail, entry}: the job's scores have been read.
    """

    def __init__(self, heads: int, blocks: int) -> None:
        self._heads, self._blocks = heads, blocks
        super().__init__(
            {
                "i": In(stream.Signature(RequestRecord)),
                "o": Out(stream.Signature(TicketRecord)),
                "o_buffer": Out(BUFFER_WRITE),
                "i_ended": In(stream.Signature(EndedRequest)),
                "o_job": Out(stream.Signature(ScoreJob)),
                "release": In(data.StructLayout({"valid": 1, "tail": 1, "entry": 4})),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Places; requests; ends."""
        m = Module()
        self._used, self._tails, self._free = Signal(self._blocks), Signal(_TAILS), Signal(self._blocks, init=-1)
        self._places(m)
        self._requests(m)
        self._ends(m)
        return m

    def _requests(self, m: Module) -> None:
        i, o, blocks = self.i, self.o, self._blocks
        keys = Array(Signal(CONTEXT_BITS + 13, name=f"key_{k}") for k in range(blocks))
        key = wire(m, Cat(i.payload.context, i.payload.block))
        found = register(m, Cat(self._used[k] & (keys[k] == key) for k in range(blocks)))
        self._entry, self._buffer, self._turn = Signal(4), Signal(4), Signal(3)
        new_entry, turns = wire(m, _lowest(~self._used)), wire(m, (i.payload.group + self._heads - 1))
        turns = wire(m, turns >> (self._heads - 1).bit_length())
        is_tail, is_index = (wire(m, i.payload.kind == kind) for kind in (RequestKind.TAIL, RequestKind.INDEX))
        tail_free = wire(m, ~is_tail | ~self._tails.all())
        initial = Signal()
        m.d.comb += [
            o.payload.request.eq(i.payload),
            o.payload.entry.eq(Mux(is_tail, self._tails[0], Mux(initial, self._entry, _encode(found)))),
            self._buffer.eq(_lowest(self._free)),
        ]
        m.d.comb += o.payload.initial.eq(initial)
        with m.FSM():
            # A cycle for the lookup: `found` is a register behind the request.
            with m.State("LOOK-UP"):
                with m.If(i.valid):
                    m.next = "PASS"
            with m.State("PASS"):
                # Chosen again in each cycle of waiting: a place may fall free meanwhile.
                m.d.sync += [self._entry.eq(new_entry), self._turn.eq(0)]
                with m.If(is_index & ~found.any()):
                    # Without a free entry it waits here; entries are given back by what has been asked for before.
                    with m.If(~self._used.all()):
                        m.next = "ALLOCATE"
                with m.Else():
                    m.d.comb += [o.valid.eq(tail_free), i.ready.eq(o.ready & tail_free)]
                    with m.If(i.ready):
                        m.next = "LOOK-UP"
            with m.State("ALLOCATE"):
                m.d.comb += [self.o_buffer.valid.eq(self._free.any()), self.o_buffer.entry.eq(self._entry)]
                m.d.comb += [self.o_buffer.turn.eq(self._turn), self.o_buffer.buffer.eq(self._buffer)]
                with m.If(self._free.any()):
                    m.d.sync += self._turn.eq(self._turn + 1)
                    with m.If(self._turn + 1 == turns):
                        m.d.sync += keys[self._entry].eq(key)
                        m.next = "PASS-FIRST"
            with m.State("PASS-FIRST"):
                m.d.comb += [initial.eq(1), o.valid.eq(1), i.ready.eq(o.ready)]
                with m.If(o.ready):
                    m.next = "LOOK-UP"

    def _places(self, m: Module) -> None:
        """Keep account of places in use; a buffer belongs to the entry that it was given to."""
        release = self.release
        entries = Array(Signal(4, name=f"owner_{k}") for k in range(self._blocks))
        # What is given in a cycle is written after what is released in it: the later statement wins.
        ended = wire(m, release.valid & ~release.tail)
        given = self.o_buffer
        for k in range(self._blocks):
            with m.If(ended & (entries[k] == release.entry)):
                m.d.sync += self._free[k].eq(1)
            with m.If(given.valid & (given.buffer == k)):
                m.d.sync += [self._free[k].eq(0), entries[k].eq(given.entry)]
            with m.If(ended & (release.entry == k)):
                m.d.sync += self._used[k].eq(0)
            with m.If(given.valid & (given.entry == k)):
                m.d.sync += self._used[k].eq(1)
        for k in range(_TAILS):
            with m.If(release.valid & release.tail & (release.entry == k)):
                m.d.sync += self._tails[k].eq(0)
            with m.If(self.o.valid & self.o.ready & (self.i.payload.kind == RequestKind.TAIL)):
                with m.If(self.o.payload.entry == k):
                    m.d.sync += self._tails[k].eq(1)

    def _ends(self, m: Module) -> None:
        """Count a block's requests; there are never more jobs than places."""
        m.submodules.jobs = jobs = StreamQueue(ScoreJob, self._blocks + _TAILS)
        wiring.connect(m, jobs.o, wiring.flipped(self.o_job))
        counts = Array(Signal(9, name=f"count_{k}") for k in range(self._blocks))
        faults = Array(Signal(FAULT_BITS, name=f"faults_{k}") for k in range(self._blocks))
        ended = register(m, self.i_ended.payload)
        valid, request, entry = Signal(), ended.record.request, ended.record.entry
        m.d.sync += valid.eq(self.i_ended.valid)
        # Expected counts from 1, `count` from 0, read before this end is added.
        before_last = register(m, (self.i_ended.payload.record.request.expected - 1)[:9])
        is_tail = wire(m, request.kind == RequestKind.TAIL)
        count, every = wire(m, counts[entry]), wire(m, faults[entry] | ended.faults)
        complete = wire(m, is_tail | (count == before_last))
        job = jobs.i.payload
        m.d.comb += [
            # Always ready: a block's end gives at most one job, and the queue has room for the jobs of all places.
            self.i_ended.ready.eq(1),
            jobs.i.valid.eq(valid & complete),
            *(job[name].eq(request[name]) for name in ("context", "group", "group_rows", "rows")),
            job.tail.eq(is_tail),
            job.entry.eq(entry),
            job.unit_rows.eq(Mux(is_tail, request.group_rows, request.block_rows)),
            job.number.eq(Mux(is_tail, request.index, request.block)),
            job.faults.eq(Mux(is_tail, ended.faults, every)),
        ]
        # Back to 0 with the last end: the entry's next block begins there.
        with m.If(valid & ~is_tail):
            m.d.sync += [counts[entry].eq(Mux(complete, 0, count + 1)), faults[entry].eq(Mux(complete, 0, every))]


def _lowest(bits: Value) -> Value:
    """Number of the lowest bit that is set."""
    number: Value = C(0)
    # The lowest comes last, and is the outermost choice.
    for k in reversed(range(len(bits))):
        number = Mux(bits[k], k, number)
    return number


def _encode(one_hot: Value) -> Value:
    """Number of the only bit that is set."""
    width = max(1, (len(one_hot) - 1).bit_length())
    return Cat(Cat(one_hot[k] for k in range(len(one_hot)) if k >> bit & 1).any() for bit in range(width))
