"""One channel: its engine, and where its pages come from.

    i_request ─► NandRequests ─► NandController ─► CodewordChecker ─┐
                                  link ▲▼         shared corrector  ├─► PageMerge ─► ChannelEngine
    i_page, i (checked pages from memory) ──────────────────────────┘                  │
                                                                  scores, done, partial sums

While page operations run (`pages`), pages that are read leave unchecked, one at a time, instead of going to the merge.
Without LUNs there is nothing but the engine.
"""

from typing import Any

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import BCH_BITS
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.nand_requests import TAG, NandRequests
from nearflash.gateware.attention.control.page_merge import PageMerge
from nearflash.gateware.attention.engine.engine import ChannelEngine
from nearflash.gateware.attention.engine.interfaces import PageHeader, PageRequest, RequestKind
from nearflash.gateware.attention.engine.issue import EVENTS
from nearflash.gateware.nand.bch.key_equation import SYNDROMES_A_BEAT
from nearflash.gateware.nand.checker import CodewordChecker
from nearflash.gateware.nand.codeword import ErrorPosition, PageTag
from nearflash.gateware.nand.controller import NandController
from nearflash.gateware.nand.interfaces import CodewordBeat
from nearflash.gateware.nand.link import NandLinkSignature
from nearflash.gateware.nand.operation import NandOperation
from nearflash.gateware.nand.pages.port import PagePortSignature
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["CHANNEL_EVENTS", "Channel"]

CHANNEL_EVENTS = data.StructLayout(
    {"engine": EVENTS, "received": 1, "corrected": 1, "uncorrectable": 1, "misdirected": 1, "page": 1}
)
"""Of this cycle: the engine's; a codeword came; from NAND: corrected, uncorrectable, misdirected; a page began."""
_PAGES_AHEAD = 4
"""Pages whose header has gone ahead of their codewords: while one is checked, the next ones come."""
_OPERATIONS = 32
"""Page operations that wait for their LUNs."""
_ENGINE_PORTS = ("i_context", "i_query", "i_gather", "o_score", "o_done", "i_drain", "o_partial")


class Channel(wiring.Component):
    """A channel of the attend kernel.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    i_context, i_query, i_gather, o_score, o_done, i_drain, o_partial : as those of ChannelEngine.
    i_page : In stream of PageHeader, i : In stream of CodewordBeat: pages from memory.
    events : Out, CHANNEL_EVENTS.
    i_request : In stream of PageRequest, to NAND. link : NandLinkSignature. o_syndromes, i_errors : streams to and from
    a channel of CorrectorShare. pages : In PagePortSignature. These with LUNs only.
    """

    def __init__(self, config: AttendConfig) -> None:
        self.config = config
        self._engine = ChannelEngine(config)
        ports: dict[str, Any] = {name: self._engine.signature.members[name] for name in _ENGINE_PORTS}
        if config.luns:
            ports |= {
                "i_request": In(stream.Signature(PageRequest)),
                "link": Out(NandLinkSignature),
                "o_syndromes": Out(stream.Signature(BCH_BITS * SYNDROMES_A_BEAT)),
                "i_errors": In(stream.Signature(ErrorPosition)),
                "pages": In(PagePortSignature),
            }
        super().__init__(
            {
                **ports,
                "i_page": In(stream.Signature(PageHeader)),
                "i": In(stream.Signature(CodewordBeat)),
                "events": Out(CHANNEL_EVENTS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The engine, and in front of it the pages of both sources."""
        m = Module()
        m.submodules.engine = engine = self._engine
        for name in _ENGINE_PORTS:
            inner, outer = getattr(engine, name), getattr(self, name)
            member = engine.signature.members[name]
            if not member.is_signature:
                m.d.comb += inner.eq(outer)
            elif member.flow is In:
                wiring.connect(m, wiring.flipped(outer), inner)
            else:
                wiring.connect(m, inner, wiring.flipped(outer))
        page, codeword, read = engine.i_page, engine.i, Signal()  # read: for a page operation
        if self.config.luns:
            m.submodules.merge = merge = PageMerge()
            wiring.connect(m, merge.o_page, page)
            wiring.connect(m, merge.o, codeword)
            self._read_nand(m, merge)
            m.d.comb += read.eq(self.pages.wanted.valid & self.pages.wanted.ready & self.pages.wanted.payload.read)
            page, codeword = merge.i_page[0], merge.i[0]
        wiring.connect(m, wiring.flipped(self.i_page), page)
        wiring.connect(m, wiring.flipped(self.i), codeword)
        m.d.comb += [
            self.events.engine.eq(engine.events),
            self.events.received.eq(engine.i.valid & engine.i.ready & engine.i.payload.last),
            self.events.page.eq((engine.i_page.valid & engine.i_page.ready) | read),
        ]
        return m

    def _read_nand(self, m: Module, merge: PageMerge) -> None:
        """A page's header goes to the merge; its page_tag waits for the page's last codeword at the checker."""
        config, record = self.config, self.i_context.record
        m.submodules.nand = nand = NandController(config.luns, config.nand, config.clock_hz, tag=TAG)
        m.submodules.requests = requests = NandRequests()
        m.submodules.checker = checker = CodewordChecker()
        m.submodules.headers = headers = Fork(PageHeader, 2)
        m.submodules.pages = pages = StreamQueue(PageTag, _PAGES_AHEAD)
        m.submodules.ahead = ahead = StreamQueue(PageHeader, _PAGES_AHEAD)
        m.submodules.page_tags = page_tags = Memory(shape=64, depth=config.contexts, init=[])
        write, read = page_tags.write_port(), page_tags.read_port(domain="comb")
        to_checker = headers.o[1]
        wiring.connect(m, wiring.flipped(self.i_request), requests.i)
        wiring.connect(m, requests.o, nand.i)
        wiring.connect(m, nand.header, requests.i_header)
        wiring.connect(m, nand.codewords, checker.i)
        wiring.connect(m, nand.link, wiring.flipped(self.link))
        wiring.connect(m, checker.o_syndromes, wiring.flipped(self.o_syndromes))
        wiring.connect(m, wiring.flipped(self.i_errors), checker.i_errors)
        wiring.connect(m, ahead.o, merge.i_page[1])
        wiring.connect(m, checker.o, merge.i[1])
        wiring.connect(m, pages.o, checker.i_page_tag)
        page_tag = pages.i.payload
        m.d.comb += [
            requests.i_context.eq(self.i_context),
            write.addr.eq(record.context),
            write.data.eq(record.page_tag),
            write.en.eq(self.i_context.valid),
            read.addr.eq(to_checker.payload.context),
            page_tag.page_tag.eq(read.data),
            page_tag.index.eq(to_checker.payload.index),
            page_tag.kind.eq(to_checker.payload.kind == RequestKind.INDEX),
            pages.i.valid.eq(to_checker.valid),
            to_checker.ready.eq(pages.i.ready),
        ]
        for event in ("corrected", "uncorrectable", "misdirected"):
            m.d.comb += self.events[event].eq(getattr(checker, event))
        self._operate(m, nand, requests.o_header, checker, headers, ahead)

    def _operate(
        self, m: Module, nand: NandController, page: Any, checker: CodewordChecker, headers: Fork, ahead: StreamQueue
    ) -> None:
        """Page operations: while they run, a page's codewords come once the mover has taken its header."""
        port = self.pages
        m.submodules.operations = operations = StreamQueue(NandOperation, _OPERATIONS)
        asked, wanted = Signal(), port.wanted.payload
        wiring.connect(m, wiring.flipped(port.operation), operations.i)
        wiring.connect(m, operations.o, nand.operations)
        wiring.connect(m, wiring.flipped(port.program), nand.program)
        wiring.connect(m, nand.results, wiring.flipped(port.result))
        wiring.connect(m, checker.o_aside, wiring.flipped(port.sealed))
        # `due` stands until the operation is taken; it is asked for once.
        operation, due = operations.o.payload, nand.due & ~asked
        # A header passes together with its item of `wanted`, and after a program that is due.
        go = ~port.active | (port.wanted.ready & ~due)
        m.d.comb += [
            checker.aside.eq(port.active),
            headers.i.payload.eq(page.payload),
            headers.i.valid.eq(page.valid & go),
            page.ready.eq(headers.i.ready & go),
            ahead.i.payload.eq(headers.o[0].payload),
            # No engine waits for the page of an operation: it leaves at `sealed`.
            ahead.i.valid.eq(headers.o[0].valid & ~port.active),
            headers.o[0].ready.eq(ahead.i.ready | port.active),
            port.wanted.valid.eq(port.active & (due | page.valid)),
            wanted.read.eq(~due),
            wanted.number.eq(Mux(due, operation.number, page.payload.index)),
            wanted.codewords.eq(Mux(due, operation.codewords, page.payload.page)),
            wanted.lun.eq(operation.lun),
        ]
        with m.If(operations.o.ready):
            m.d.sync += asked.eq(0)
        with m.Elif(due & port.wanted.ready):
            m.d.sync += asked.eq(1)
