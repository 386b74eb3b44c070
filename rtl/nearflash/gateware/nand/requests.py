"""Request table: page requests from their arrival to their last codeword.

A request takes a free slot, and a job for each of its pages goes to the queue of that page's lun: the first page (K)
lies on the lun that the address names, the second one (V) on its sibling, lun XOR 1, at the same row. When the pages
of all its jobs have arrived in their registers, the request's slot number leaves on `ready`.

Contract: requests enter the job queues one after the other, so two requests that share two luns come in the same
order in both queues: the one that came first can always go on. Reset empties the table, which takes `depth` clocks.
"""

from typing import Any

from amaranth import Array, Cat, Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.nand.interfaces import page_header, page_request
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["RequestTable", "table_entry"]


def table_entry(tag: ShapeLike) -> data.StructLayout:
    """Layout of a request's entry: its header, log2 of the codewords of a page, whether it reads both of its pages, the
    LUN of the first page, and the row."""
    return data.StructLayout({"header": page_header(tag), "page_log2": 3, "both": 1, "lun": 8, "row": 32})


class RequestTable(wiring.Component):
    """Slots of `depth` requests.

    Parameters
    ----------
    luns : NAND LUNs; the upper bits of a request's LUN are ignored. depth : slots, at least 2.
    tag : shape of the reader's part of a request.

    Members
    -------
    i : In stream of page_request(tag).
    jobs : Out stream of {lun, slot}.
    slot : In, which entry `entry` shows, combinationally.
    arrive : In, one more page of `slot` is in its register, or has failed.
    release : In, `slot` is free again.
    ready : Out stream of slot numbers.
    """

    def __init__(self, luns: int, depth: int, tag: ShapeLike) -> None:
        self.luns, self.depth, self.tag = luns, depth, tag
        job = data.StructLayout({"lun": range(luns), "slot": range(depth)})
        super().__init__(
            {
                "i": In(stream.Signature(page_request(tag))),
                "jobs": Out(stream.Signature(job)),
                "slot": In(range(depth)),
                "entry": Out(table_entry(tag)),
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
        m.submodules.entries = entries = Memory(shape=table_entry(self.tag), depth=self.depth, init=[])
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
        pages = Signal(2)  # which ones are read
        m.d.comb += [
            pages.eq(_pages(request.codewords, request.page_log2)),
            write.data.page_log2.eq(request.page_log2),
            write.data.both.eq(pages.all()),
            write.data.lun.eq(request.lun),
            write.data.row.eq(request.row),
            write.data.header.tag.eq(request.tag),
            write.data.header.codewords.eq(request.codewords),
        ]
        job, both = self.jobs.payload, Signal()
        with m.FSM():
            with m.State("TAKE"):
                m.d.comb += [
                    self.i.ready.eq(free.valid & ~filling),
                    free.ready.eq(self.i.valid & ~filling),
                    write.en.eq(self.i.valid & self.i.ready),
                ]
                m.d.sync += [job.slot.eq(free.payload), job.lun.eq(request.lun ^ (~pages[0])[0]), both.eq(pages.all())]
                with m.If(write.en):
                    m.next = "GIVE"
            with m.State("GIVE"):
                m.d.comb += self.jobs.valid.eq(1)
                with m.If(self.jobs.ready):
                    m.d.sync += [both.eq(0), job.lun.eq(job.lun ^ 1)]
                    with m.If(~both):
                        m.next = "TAKE"


def _pages(codewords: Value, page_log2: Value) -> Value:
    """Whether there are codewords in the first page, and in the second."""
    # some[k]: any of the codewords 2**(k - 1) .. 2**k - 1, some[0]: the codeword 0.
    some = [codewords[0], *(codewords[1 << at : 2 << at].any() for at in range(6))]
    first = Array(Cat(some[: at + 1]).any() for at in range(6))
    return Cat(first[page_log2], Array(some[1:])[page_log2])
