"""Request table: page requests from their arrival to their last codeword.

A request takes a free slot, and a job for each of its pages goes to the queue of that page's lun: the first page (K)
lies on the lun that the address names, the second one (V) on its sibling, lun XOR 1, at the same row. When the pages
of all its jobs have arrived in their registers, the request's slot number leaves on `ready`.

Contract: requests enter the job queues one after the other, so two requests that share two luns come in the same
order in both queues: the one that came first can always go on. Reset empties the table, which takes `depth` clocks.
"""

from typing import Any

from amaranth import Array, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import (
    CONTEXT_BITS,
    ContextRecord,
    PageHeader,
    PageRequest,
    RequestKind,
    header_of,
)
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["RequestTable", "TableEntry"]

_PAGE_LOG2_MAX = 5


class TableEntry(data.Struct):
    """What is kept of a request."""

    header: PageHeader
    page_log2: 3
    """log2 of the codewords of a page."""
    both: 1
    """It reads both of its pages."""
    lun: 8
    """Of the first page."""
    row: 32


class RequestTable(wiring.Component):
    """Slots of `depth` requests.

    Parameters
    ----------
    luns : NAND luns; the upper bits of an address's lun are not looked at. depth : slots, at least 2.

    Members
    -------
    context, context_valid : In, broadcast of ContextRecord.
    i : In stream of PageRequest, those with `memory` clear.
    jobs : Out stream of {lun, slot}.
    slot : In, which entry `entry` shows, combinationally.
    arrive : In, one more page of `slot` is in its register, or has failed.
    release : In, `slot` is free again.
    ready : Out stream of slot numbers.
    """

    def __init__(self, luns: int, depth: int) -> None:
        self.luns, self.depth = luns, depth
        job = data.StructLayout({"lun": range(luns), "slot": range(depth)})
        super().__init__(
            {
                "context": In(ContextRecord),
                "context_valid": In(1),
                "i": In(stream.Signature(PageRequest)),
                "jobs": Out(stream.Signature(job)),
                "slot": In(range(depth)),
                "entry": Out(TableEntry),
                "arrive": In(1),
                "release": In(1),
                "ready": Out(stream.Signature(range(depth))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A list of free slots; a request's jobs one after the other; one bit a slot for half of a pair."""
        m = Module()
        m.submodules.free = free = StreamQueue(range(self.depth), self.depth)
        m.submodules.done = done = StreamQueue(range(self.depth), self.depth)
        m.submodules.entries = entries = Memory(shape=TableEntry, depth=self.depth, init=[])
        write, read = entries.write_port(), entries.read_port(domain="comb")
        filling, fill = Signal(init=1), Signal(range(self.depth))
        with m.If(filling):
            m.d.sync += [fill.eq(fill + 1), filling.eq(fill != self.depth - 1)]
        m.d.comb += [
            free.i.payload.eq(Mux(filling, fill, self.slot)),
            free.i.valid.eq(filling | self.release),
            write.addr.eq(free.o.payload),
            read.addr.eq(self.slot),
            self.entry.eq(read.data),
            done.i.payload.eq(self.slot),
        ]
        wiring.connect(m, done.o, wiring.flipped(self.ready))
        self._enter(m, free.o, write, filling)

        halves = Signal(self.depth)  # slots of which one of two pages has arrived
        half = halves.bit_select(self.slot, 1)
        with m.If(self.arrive):
            m.d.comb += done.i.valid.eq(~self.entry.both | half)
            m.d.sync += half.eq(self.entry.both & ~half)
        return m

    def _enter(self, m: Module, free: Any, write: Any, filling: Signal) -> None:
        request = self.i.payload
        lun = request.address[32:40]
        m.submodules.page_sizes = sizes = Memory(shape=3, depth=1 << CONTEXT_BITS, init=[])
        size_write, size = sizes.write_port(), sizes.read_port(domain="comb")
        pages = Signal(2)  # which ones are read
        page_log2 = Mux(request.kind == RequestKind.PAGE, _PAGE_LOG2_MAX, size.data)
        m.d.comb += [
            size_write.addr.eq(self.context.context),
            size_write.data.eq(_log2(self.context.page_codewords)),
            size_write.en.eq(self.context_valid),
            size.addr.eq(request.context),
            write.data.page_log2.eq(page_log2),
            pages.eq(_pages(request.codewords, page_log2)),
            write.data.both.eq(pages.all()),
            write.data.lun.eq(lun),
            write.data.row.eq(request.address[:32]),
            write.data.header.eq(header_of(request)),
        ]
        job, both = self.jobs.payload, Signal()
        with m.FSM():
            with m.State("TAKE"):
                m.d.comb += [
                    self.i.ready.eq(free.valid & ~filling),
                    free.ready.eq(self.i.valid & ~filling),
                    write.en.eq(self.i.valid & self.i.ready),
                ]
                m.d.sync += [job.slot.eq(free.payload), job.lun.eq(lun ^ (~pages[0])[0]), both.eq(pages.all())]
                with m.If(write.en):
                    m.next = "GIVE"
            with m.State("GIVE"):
                m.d.comb += self.jobs.valid.eq(1)
                with m.If(self.jobs.ready):
                    m.d.sync += [both.eq(0), job.lun.eq(job.lun ^ 1)]
                    with m.If(~both):
                        m.next = "TAKE"


def _log2(one_hot: Value) -> Value:
    return Cat(Cat(bit for at, bit in enumerate(one_hot) if at >> place & 1).any() for place in range(3))


def _pages(codewords: Value, page_log2: Value) -> Value:
    """Whether there are codewords in the first page, and in the second."""
    # some[k]: any of the codewords 2**(k - 1) .. 2**k - 1, some[0]: the codeword 0.
    some = [codewords[0], *(codewords[1 << at : 2 << at].any() for at in range(6))]
    first = Array(Cat(some[: at + 1]).any() for at in range(6))
    return Cat(first[page_log2], Array(some[1:])[page_log2])
