"""Scan walker: from a prepared head to the requests for its embedding pages.

    i, i_mask ─► list of the pages that hold a selected channel ──┐
    page table ─► entries, read ahead ────────────────────────────┴─► requests, block by block ─► IndexQueues ─► o

Contract: for every whole block of a head one request for each page that holds a selected channel, those of one channel
in order; the head's `WalkEnd` when all are in the queues. Only the codewords of selected rows are asked for. A block's
first request waits until its channel has score buffers for it. After an entry that this build cannot read, or a page on
another channel than its block's first one, the head has fault ENTRY and no further block is begun; a block that has
begun is completed by repeating its last request, so that its channel comes to an end with it.

Timing: one cycle a channel, then two an entry, while the queues have room and entries come; back-pressure: yes.
Limits: a 64-bit port.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.entry import PageEntryLayout, entry_is_legal
from nearflash.gateware.attention.control.index_queues import INDEX_ROWS_MAX, IndexQueues
from nearflash.gateware.attention.control.interfaces import BLOCK_BITS, BlockCredit, ScanPlan, WalkEnd
from nearflash.gateware.attention.engine.interfaces import MaskBeat, RequestKind, RoutedRequest
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.stream.half import HalfBuffer
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["ScanWalker"]

_PAGES_MAX = 128
_ENTRY_BYTES = 8
_MASK_BEATS = 64
"""All channels of a head: its mask must not hold Prepare back, which sends the plan behind it."""


class ScanWalker(wiring.Component):
    """Walks over a head's embedding pages.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    i : In stream of ScanPlan. i_mask : In stream of MaskBeat, the head's selected channels; those of one head may come
        ahead of its plan.
    credit_valid, credit : In, broadcast of BlockCredit. room : In, by channel, the router has a place for it.
    o : Out stream of RoutedRequest (of any source). o_end : Out stream of WalkEnd.
    bus : Out Axi4ReadSignature. clear : In, forgets `error`. error : Out BusError.
    idle : Out, no head is being walked.
    """

    def __init__(self, config: AttendConfig) -> None:
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(ScanPlan)),
                "i_mask": In(stream.Signature(MaskBeat)),
                "credit_valid": In(1),
                "credit": In(BlockCredit),
                "room": In(self.config.channels),
                "o": Out(stream.Signature(RoutedRequest)),
                "o_end": Out(stream.Signature(WalkEnd)),
                "bus": Out(Axi4ReadSignature(64)),
                "clear": In(1),
                "error": Out(BusError),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """List the head's pages, then walk over the table's entries; the table is read from the head's start on."""
        m = Module()
        m.submodules.reader = reader = BurstReader(64, max_outstanding=4, max_burst_bytes=512)
        m.submodules.masks = masks = StreamQueue(MaskBeat, _MASK_BEATS)
        m.submodules.mask = mask = HalfBuffer(MaskBeat)  # a beat is looked at for four cycles
        wiring.connect(m, masks.o, mask.i)
        m.submodules.queues = queues = IndexQueues(self.config)
        m.submodules.pages = pages = Memory(shape=7 + INDEX_ROWS_MAX, depth=_PAGES_MAX, init=[])
        wiring.connect(m, reader.bus, wiring.flipped(self.bus))
        wiring.connect(m, wiring.flipped(self.i_mask), masks.i)
        wiring.connect(m, queues.o, wiring.flipped(self.o))
        m.d.comb += [
            reader.clear.eq(self.clear),
            self.error.eq(reader.error),
            *(getattr(queues, name).eq(getattr(self, name)) for name in ("room", "credit_valid", "credit")),
        ]
        self._asked = queues.i  # driven by registers
        self._plan = plan = Signal(ScanPlan)
        self._listed = Signal(8)  # pages in the list
        self._end = Signal(WalkEnd)
        m.d.comb += self.o_end.payload.eq(self._end)

        begin, walking = Signal(), Signal()
        self._ask(m, reader, begin)
        walked = self._walk(m, reader, pages.read_port(domain="comb"), walking)
        with m.FSM():
            with m.State("WAIT-HEAD"):
                m.d.comb += [self.i.ready.eq(1), self.idle.eq(1), begin.eq(self.i.valid)]
                m.d.sync += [
                    plan.eq(self.i.payload),
                    self._listed.eq(0),
                    self._end.eq(0),
                    self._end.context.eq(self.i.payload.context),
                    self._end.kind.eq(RequestKind.INDEX),
                ]
                with m.If(self.i.valid):
                    m.next = "LIST-PAGES"
            with m.State("LIST-PAGES"):
                with m.If(self._list(m, mask.o, pages.write_port())):
                    m.next = "WALK"
            with m.State("WALK"):
                m.d.comb += walking.eq(~walked)
                with m.If(walked):
                    m.next = "END"
            with m.State("END"):
                # After the last request is out: its count is part of the end.
                m.d.comb += self.o_end.valid.eq(~self._asked.valid)
                with m.If(self.o_end.valid & self.o_end.ready):
                    m.next = "WAIT-HEAD"
        with m.If(self._asked.ready & self._asked.valid):
            m.d.sync += self._end.requests.eq(self._end.requests + 1)
        return m

    def _ask(self, m: Module, reader: BurstReader, begin: Signal) -> None:
        """Commands for the table, one a block."""
        command, left = reader.i_command, Signal(BLOCK_BITS)
        m.d.comb += [command.valid.eq(left != 0), command.payload.beats.eq(self._plan.index_pages)]
        with m.If(begin):
            m.d.sync += [left.eq(self.i.payload.blocks), command.payload.address.eq(self.i.payload.index_table)]
        with m.Elif(command.valid & command.ready):
            step = self._plan.index_pages * _ENTRY_BYTES
            m.d.sync += [left.eq(left - 1), command.payload.address.eq(command.payload.address + step)]

    def _list(self, m: Module, mask: Any, write: Any) -> Signal:
        """One channel a cycle: collect the rows of a page, and keep the page if there are any. True with the last."""
        beat = mask.payload
        place, row, page = Signal(2), Signal(range(INDEX_ROWS_MAX)), Signal(7)
        rows, collected = Signal(INDEX_ROWS_MAX), Signal(INDEX_ROWS_MAX)
        some = Signal()  # of rows
        last, page_end, selected = Signal(), Signal(), Signal()
        m.d.comb += [
            selected.eq(beat.mask.bit_select(place, 1)),
            last.eq(beat.last & (place == 3)),
            page_end.eq((row == self._plan.index_rows - 1) | last),
            collected.eq(rows | (selected << row)),
            write.addr.eq(self._listed),
            write.data.eq(Cat(page, collected)),
            mask.ready.eq(place == 3),
        ]
        with m.If(mask.valid):
            m.d.comb += write.en.eq(page_end & (some | selected))
            m.d.sync += [place.eq(place + 1), row.eq(row + 1), rows.eq(collected), some.eq(some | selected)]
            with m.If(write.en):
                m.d.sync += self._listed.eq(self._listed + 1)
            with m.If(page_end):
                m.d.sync += [row.eq(0), rows.eq(0), some.eq(0), page.eq(Mux(last, 0, page + 1))]
        done = Signal()
        m.d.comb += done.eq(mask.valid & last)
        return done

    def _walk(self, m: Module, reader: BurstReader, read: Any, walking: Signal) -> Signal:
        """Two cycles an entry while `walking`: look, then step. True when all blocks are through."""
        plan, end, asked = self._plan, self._end, self._asked
        at, page, index = Signal(8), Signal(8), Signal(20)
        channel = Signal(range(self.config.channels))
        entry, listed_page, listed_rows, rows = (
            Signal(PageEntryLayout), Signal(7), Signal(INDEX_ROWS_MAX), Signal(INDEX_ROWS_MAX)
        )  # fmt: skip
        block, skipping, first, wanted, legal = Signal(BLOCK_BITS), Signal(), Signal(), Signal(), Signal()
        issue, step, looked = Signal(), Signal(), Signal()
        m.d.comb += [
            entry.eq(reader.o.payload),
            read.addr.eq(at),
            Cat(listed_page, listed_rows).eq(read.data),
            issue.eq(wanted & (~first | legal)),
            step.eq(looked & (~issue | ~asked.valid | asked.ready)),
            reader.o.ready.eq(step),
        ]
        m.d.sync += [
            first.eq(at == 0),
            wanted.eq(~skipping & (at != self._listed) & (listed_page == page)),
            legal.eq(entry_is_legal(entry, self.config) & ((at == 0) | (entry.channel == channel))),
            rows.eq(listed_rows),
            # A cycle between entry and step: page, list and rules come from registers.
            looked.eq(walking & reader.o.valid & ~step),
        ]
        # Cleared first: what is issued in this cycle is set below.
        with m.If(asked.ready):
            m.d.sync += asked.valid.eq(0)
        with m.If(step):
            m.d.sync += [page.eq(page + 1), index.eq(index + 1), at.eq(at + wanted)]
            with m.If(issue):
                m.d.sync += [asked.valid.eq(1), end.dones.eq(end.dones + first)]
            with m.If(issue & legal):
                m.d.sync += channel.eq(entry.channel)
                self._request(m, entry, rows, index, block, page)
            with m.If(wanted & ~legal):
                # A bad first entry takes the whole block: without its channel no other page may go.
                m.d.sync += [end.faults.eq(Fault.ENTRY), skipping.eq(first)]
            with m.If(page == plan.index_pages - 1):
                m.d.sync += [page.eq(0), at.eq(0), block.eq(block + 1)]
                m.d.sync += skipping.eq((end.faults != 0) | (wanted & ~legal))
        done = Signal()
        m.d.comb += done.eq(block == plan.blocks)
        with m.If(~walking):
            m.d.sync += [block.eq(0), index.eq(0), skipping.eq(0)]
        return done

    def _request(self, m: Module, entry: Any, rows: Signal, index: Signal, block: Signal, page: Signal) -> None:
        """Fill the register in front of the queues."""
        asked, plan = self._asked.payload, self._plan
        values = {
            "context": plan.context, "passes": plan.passes, "index": index, "block": block, "page": page,
            "expected": self._listed, "row_codewords": plan.row_codewords, "rows": rows,
            "memory": entry.memory, "address": entry.address,
        }  # fmt: skip
        m.d.sync += asked.channel.eq(entry.channel)
        m.d.sync += [asked.request[name].eq(value) for name, value in values.items()]
