"""The `attend` kernel: decode attention of heads whose K and V lie on flash channels or in memory.

    s_axi_control ─ RegisterFile ─ Batch ─► Prepare ─► ScanWalker, TokenWalker ─► RequestRouter ─┬─► channels (NAND)
                                              ▲                                                  └─► MemorySource
                                   ContextTable ◄─ done, alpha, finished                                │
    channels ─► ScoreArbiter ─► Selection ─► masks ─► TokenWalker         channels ◄─ PageDelivery ◄────┘
    channels ─► Finish ─► out, completions

docs/contracts/attention.md draws the heads' way through them. With `mask_beats` an EntryRing gives heads their lines of
the selection's store, and a TokenWalker of its own has the unindexed suffixes, which would wait for gathers else: scans
of the next heads end while those before are gathered. All memory traffic is on gmem0: five or six readers share its
read channels, Finish has its write channels; where the port has more than 64 bits, a ReadWidener and a WriteWidener
stand before it. With LUNs a batch may also be one of page operations: then PageMover has the channels, a place among
the readers, and the write channels.

Contract: the registers of nearflash.abi.registers.ATTEND, started as an XRT kernel (ap_ctrl_chain); descriptors and
completions of nearflash.abi.attention. `waiting` is live, all other status stands still from `done` to the next start.
Numerics: docs/contracts/attention.md, 1; equals nearflash.model.attention to the bit.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from nearflash.abi.kernel.config import AttendConfig
from nearflash.abi.registers import ATTEND
from nearflash.gateware.attention.control.batch import Batch
from nearflash.gateware.attention.control.channel import Channel
from nearflash.gateware.attention.control.contexts import ContextTable
from nearflash.gateware.attention.control.entry_ring import LINE_ENTRIES_LOG2, EntryRing
from nearflash.gateware.attention.control.finish import Finish
from nearflash.gateware.attention.control.memory import MemorySource
from nearflash.gateware.attention.control.nand_requests import connect_operation_reads
from nearflash.gateware.attention.control.pages import PageDelivery
from nearflash.gateware.attention.control.prepare import Prepare
from nearflash.gateware.attention.control.router import RequestRouter
from nearflash.gateware.attention.control.scan import ScanWalker
from nearflash.gateware.attention.control.scores import ScoreArbiter
from nearflash.gateware.attention.control.tokens import TokenWalker
from nearflash.gateware.attention.select.selection import Selection
from nearflash.gateware.bus.arbiter import ReadArbiter
from nearflash.gateware.bus.axi import Axi4Signature, connect_channels
from nearflash.gateware.bus.read_widener import ReadWidener
from nearflash.gateware.bus.registers import RegisterFile
from nearflash.gateware.bus.write_widener import WriteWidener
from nearflash.gateware.nand.bch.share import CorrectorShare
from nearflash.gateware.nand.link import NandLinkSignature
from nearflash.gateware.nand.pages.mover import PageMover
from nearflash.gateware.nand.sealed import SealedChecker
from nearflash.gateware.top.control import connect_control, connect_counters, control_members

__all__ = ["AttendKernel"]

_SUMMED = {
    "codewords_received": "received", "codewords_corrected": "corrected",
    "codewords_uncorrectable": "uncorrectable", "codewords_foreign": "misdirected",
}  # fmt: skip
_ENGINE_SUMMED = {
    "beats_used": "beat_used", "lane_cycles": "lane_cycle", "wait_data_cycles": "wait_data",
    "wait_score_cycles": "wait_score",
}  # fmt: skip
_CORRECTOR_CHANNELS = 4
"""Channels that share a corrector."""


class AttendKernel(wiring.Component):
    """Top of the attend kernel.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    s_axi_control : In AxiLiteSignature, the register block.
    m_axi_gmem0 : Out Axi4Signature, `config.port_bits` wide.
    nand0, nand1, ... : NandLinkSignature, one a channel, with LUNs only.
    interrupt : Out, level.
    git_revision : In, first 32 bits of the git revision; tied by the board's wrapper, 0 in simulation.

    Inside all buses have 64 bits; on a wider port what is read and written goes as whole wide beats.
    """

    def __init__(self, config: AttendConfig) -> None:
        self.config = config
        links = {f"nand{index}": Out(NandLinkSignature) for index in range(config.channels) if config.luns}
        super().__init__(control_members(ATTEND, {"m_axi_gmem0": Out(Axi4Signature(config.port_bits)), **links}))

    def elaborate(self, platform: object) -> Module:
        """Units; then what connects them, by what flows."""
        m = Module()
        config = self._inner = self.config.inner
        m.submodules.registers = self._registers = RegisterFile(ATTEND)
        m.submodules.batch = self._batch = Batch(config, self._registers.values.shape())
        m.submodules.prepare = self._prepare = Prepare(config)
        m.submodules.contexts = self._contexts = ContextTable(config)
        m.submodules.scan = self._scan = ScanWalker(config)
        m.submodules.tokens = self._tokens = TokenWalker(config)
        self._tails = self._tokens
        if config.mask_beats:
            m.submodules.tails = self._tails = TokenWalker(config)
            m.submodules.ring = self._ring = EntryRing(config.contexts, config.score_entries >> LINE_ENTRIES_LOG2)
        # In the order of their requests' places in the router: the last one goes first.
        self._walkers: list[Any] = [self._scan, *([self._tails] if config.mask_beats else []), self._tokens]
        yields = len(self._walkers) - 1 if config.mask_beats else None
        m.submodules.router = self._router = RequestRouter(config, len(self._walkers) + bool(config.luns), yields)
        m.submodules.memory = self._memory = MemorySource(config)
        m.submodules.sealed = self._sealed = SealedChecker()
        m.submodules.pages = self._pages = PageDelivery(config.channels, config.contexts)
        m.submodules.scores = self._scores = ScoreArbiter(config.channels, config.contexts)
        m.submodules.selection = self._selection = Selection(config)
        m.submodules.finish = self._finish = Finish(config)
        self._channels = [Channel(config) for _ in range(config.channels)]
        for index, channel in enumerate(self._channels):
            m.submodules[f"channel_{index}"] = channel

        connect_control(m, self, self._registers, self._batch)
        self._connect_heads(m)
        self._connect_requests(m)
        self._connect_channels(m)
        self._connect_memory(m)
        if config.luns:
            self._connect_mover(m)
        else:
            wiring.connect(m, self._batch.o, self._prepare.i)
        self._count(m)
        self._show_waiting(m)
        return m

    def _connect_heads(self, m: Module) -> None:
        """A head's way: prepared, scanned, selected, gathered, finished."""
        batch, prepare, contexts, scan, tokens = self._batch, self._prepare, self._contexts, self._scan, self._tokens
        selection, finish, values = self._selection, self._finish, self._registers.values
        for source, sink in (
            (contexts.o_free, prepare.i_context), (prepare.o, contexts.i),
            (prepare.o_scan, scan.i), (prepare.o_mask, scan.i_mask), (contexts.o_tail, self._tails.i_tail),
            (contexts.o_dense, tokens.i_dense), (contexts.o_slot, tokens.i_slot), (scan.o_end, contexts.i_end[0]),
            (tokens.o_end, contexts.i_end[1]), (contexts.o_select, selection.i_command),
            (selection.o_start, tokens.i_start), (selection.o_mask, tokens.i_mask),
            (contexts.o_finish, finish.i_command), (finish.o_free, contexts.i_finished),
            (self._scores.o, selection.i), (selection.o_alpha, contexts.i_alpha),
        ):  # fmt: skip
            wiring.connect(m, source, sink)
        alpha = selection.o_alpha
        m.d.comb += [
            batch.ended.eq(finish.o_free.valid & finish.o_free.ready),
            batch.lost.eq(finish.lost),
            batch.error.eq(finish.error),
            prepare.descriptors_address.eq(values.descriptors_address),
            prepare.contexts.eq(contexts.contexts),
            prepare.expired.eq(contexts.expired),
            finish.completions_address.eq(values.completions_address),
            contexts.start.eq(batch.begin),
            contexts.contexts.eq(1 << batch.contexts_log2),
            contexts.watchdog.eq(values.watchdog),
            selection.contexts_log2.eq(batch.contexts_log2),
            scan.credit_valid.eq(contexts.credit_valid),
            scan.credit.eq(contexts.credit),
            scan.room.eq(self._router.room),
            *(
                statement
                for walker in self._walkers[1:]
                for statement in (
                    walker.plan_valid.eq(prepare.o.valid & prepare.o.ready),
                    walker.plan_context.eq(prepare.o.payload.select.context),
                    walker.plan.eq(prepare.o.payload.token),
                )
            ),
            finish.i_alpha.payload.eq(alpha.payload),
            # Finish listens; the context table takes the item, so that both see it once.
            finish.i_alpha.valid.eq(alpha.valid & alpha.ready),
            Cat(selection.i_scale.valid, selection.i_scale.write).eq(Cat(prepare.scale_valid, prepare.scale)),
        ]
        if self.config.mask_beats:
            self._connect_ring(m)
        # Broadcasts: the context's constants, and where a head's sums are.
        described: list[Any] = [selection, self._pages, self._scores, *self._channels]
        gathering: list[Any] = [finish, *self._channels]
        for unit in described:
            m.d.comb += [unit.i_context.valid.eq(prepare.record_valid), unit.i_context.record.eq(prepare.record)]
        for unit in gathering:
            m.d.comb += [unit.i_gather.valid.eq(tokens.gather_valid), unit.i_gather.write.eq(tokens.gather)]

    def _connect_ring(self, m: Module) -> None:
        """A head's lines: taken before its scan, given back when it is selected or ends; hurry where one waits."""
        ring, prepare, selection, finish = self._ring, self._prepare, self._selection, self._finish
        wiring.connect(m, self._tails.o_end, self._contexts.i_end[2])
        wiring.connect(m, prepare.o_lines, ring.i)
        m.d.comb += [
            selection.i_base.valid.eq(ring.i.valid & ring.i.ready),
            selection.i_base.context.eq(ring.i.payload.context),
            selection.i_base.line.eq(ring.base),
        ]
        # A cycle late: both pulses wait for the context table's choice among all events. A context comes to its next
        # head many cycles after that.
        m.d.sync += [
            ring.give_back[0].eq(selection.done),
            ring.give_back[1].eq(Cat(finish.o_free.valid & finish.o_free.ready, finish.o_free.payload)),
            self._router.hurry.eq(ring.waits),
        ]

    def _connect_requests(self, m: Module) -> None:
        """From the walkers to the page sources; pages from memory to their channels."""
        router, memory, sealed, pages = self._router, self._memory, self._sealed, self._pages
        for source, sink in (
            *((walker.o, router.i[place]) for place, walker in enumerate(self._walkers)), (router.o_memory, memory.i),
            (memory.o_header, pages.i), (memory.o, sealed.i), (pages.o_page_tag, sealed.i_page_tag),
            (sealed.o, pages.i_codeword),
        ):  # fmt: skip
            wiring.connect(m, source, sink)

    def _connect_channels(self, m: Module) -> None:
        """Pages, scores, sums; with NAND its requests, its link and its share of a corrector."""
        units = self.config.luns
        correctors = [
            CorrectorShare(min(_CORRECTOR_CHANNELS, self.config.channels - first))
            for first in range(0, self.config.channels, _CORRECTOR_CHANNELS)
            if units
        ]
        for index, corrector in enumerate(correctors):
            m.submodules[f"corrector_{index}"] = corrector
        for index, channel in enumerate(self._channels):
            for source, sink in (
                (self._pages.o_page[index], channel.i_page), (self._pages.o[index], channel.i),
                (channel.o_score, self._scores.i[index]), (channel.o_done, self._contexts.i_done[index]),
                (self._finish.o_drain[index], channel.i_drain), (channel.o_partial, self._finish.i_partial[index]),
            ):  # fmt: skip
                wiring.connect(m, source, sink)
            m.d.comb += [
                channel.i_query.valid.eq(self._prepare.query_valid),
                channel.i_query.row.eq(self._prepare.query),
            ]
            if units:
                corrector, place = correctors[index // _CORRECTOR_CHANNELS], index % _CORRECTOR_CHANNELS
                wiring.connect(m, self._router.o[index], channel.i_request)
                wiring.connect(m, channel.o_syndromes, corrector.i[place])
                wiring.connect(m, corrector.o[place], channel.i_errors)
                wiring.connect(m, channel.link, wiring.flipped(getattr(self, f"nand{index}")))

    def _connect_memory(self, m: Module) -> None:
        """The readers share the port; their first errors are kept until the next batch."""
        readers: list[Any] = [self._prepare, self._scan, self._tokens, self._memory]
        readers += [self._tails] if self.config.mask_beats else []
        buses = [*(reader.bus for reader in readers), self._finish.read_bus]
        if self.config.luns:
            m.submodules.mover = self._mover = PageMover(self._inner)
            buses.append(self._mover.read_bus)
        inner_bits = self._inner.port_bits
        m.submodules.arbiter = arbiter = ReadArbiter(len(buses), inner_bits)
        for bus, port in zip(buses, arbiter.port, strict=True):
            wiring.connect(m, bus, port)
        self._writes: Any = self.m_axi_gmem0
        if self.config.port_bits == inner_bits:
            connect_channels(m, arbiter.bus, self.m_axi_gmem0)
        else:
            m.submodules.reads = reads = ReadWidener(inner_bits, self.config.port_bits)
            m.submodules.writes = writes = WriteWidener(inner_bits, self.config.port_bits)
            wiring.connect(m, arbiter.bus, reads.port)
            for widener in (reads, writes):
                connect_channels(m, widener.bus, self.m_axi_gmem0)
            self._writes = writes.port
        if not self.config.luns:
            connect_channels(m, self._finish.write_bus, self._writes)
        m.d.comb += [part.clear.eq(self._batch.begin) for part in (*readers, self._finish)]
        # Any reader's error counts against every head that ends while it stands.
        m.d.comb += self._contexts.memory_error.eq(Cat(reader.error.seen for reader in readers).any())

    def _connect_mover(self, m: Module) -> None:
        """A batch's numbers, its ends and the write channels belong to heads or to page operations."""
        mover, batch, prepare, finish = self._mover, self._batch, self._prepare, self._finish
        connect_operation_reads(m, mover.o_request, self._router.i[len(self._walkers)])
        for port, channel in zip(mover.channel, self._channels, strict=True):
            wiring.connect(m, port, channel.pages)
        m.d.comb += [
            mover.active.eq(batch.pages),
            mover.begin.eq(batch.begin),
            mover.operations_address.eq(self._registers.values.descriptors_address),
            mover.completions_address.eq(self._registers.values.completions_address),
            *(sink.payload.eq(batch.o.payload) for sink in (prepare.i, mover.i)),
            prepare.i.valid.eq(batch.o.valid & ~batch.pages),
            mover.i.valid.eq(batch.o.valid & batch.pages),
            batch.o.ready.eq(Mux(batch.pages, mover.i.ready, prepare.i.ready)),
        ]
        # The write channels have one user a batch: no arbiter, and no order between their responses.
        with m.If(batch.pages):
            m.d.comb += [batch.ended.eq(mover.ended), batch.lost.eq(mover.lost), batch.error.eq(mover.error)]
            connect_channels(m, mover.write_bus, self._writes)
        with m.Else():
            connect_channels(m, finish.write_bus, self._writes)

    def _count(self, m: Module) -> None:
        """Events in a register on their way to the counters: they come from everywhere."""
        widths = {name: 4 for name in (*_SUMMED, *_ENGINE_SUMMED)} | {"codewords_asked": 8}
        widths |= {"token_requests": 2} if self.config.mask_beats else {}
        bus, phases, finish = self.m_axi_gmem0, self._contexts.phases, self._finish
        walkers = [walker.o for walker in self._walkers]  # each may ask in a cycle
        asked = [Signal(5, name=f"asked_codewords_{index}") for index in range(2 * len(walkers))]  # a cycle later
        halves = [(o, half) for o in walkers for half in range(2)]
        for (o, half), codewords in zip(halves, asked, strict=True):
            m.d.sync += codewords.eq(Mux(o.valid & o.ready, sum(o.payload.request.codewords.word_select(half, 16)), 0))
        events: dict[str, Any] = {
            "cycles": 1,
            "heads_done": finish.o_free.valid & finish.o_free.ready,
            "heads_faulty": finish.o_free.valid & finish.o_free.ready & finish.faulty,
            "index_requests": self._scan.o.valid & self._scan.o.ready,
            "token_requests": sum((o.valid & o.ready for o in walkers[2:]), walkers[1].valid & walkers[1].ready),
            "codewords_asked": sum(asked),
            **{name: sum(channel.events[event] for channel in self._channels) for name, event in _SUMMED.items()},
            **{
                name: sum(channel.events.engine[event] for channel in self._channels)
                for name, event in _ENGINE_SUMMED.items()
            },
            "prepare_cycles": ~self._prepare.idle,
            "scan_cycles": phases.scan != 0,
            "select_cycles": self._selection.busy,
            "gather_cycles": phases.gather != 0,
            "finish_cycles": finish.busy,
            "read_beats": bus.rvalid & bus.rready,
            "write_beats": bus.wvalid & bus.wready,
        }
        connect_counters(m, self._registers, self._batch, events, widths)

    def _show_waiting(self, m: Module) -> None:
        """Show what waits: phases with heads in them, and channels with pages asked for that have not begun to come."""
        waiting, phases = self._registers.status.waiting, self._contexts.phases
        channels = [self._await_pages(m, index) for index in range(self.config.channels)]
        m.d.comb += [
            waiting.memory.eq(~self._memory.idle),
            waiting.prepare.eq(~self._prepare.idle),
            waiting.scan.eq(phases.scan != 0),
            waiting.select.eq(self._selection.busy),
            waiting.gather.eq(phases.gather != 0),
            waiting.finish.eq(self._finish.busy),
            waiting.pages.eq(self._mover.busy if self.config.luns else 0),
            waiting.channels.eq(Cat(channels)),
        ]

    def _await_pages(self, m: Module, index: int) -> Value:
        """Whether pages for a channel were asked for that have not begun to come."""
        pages = Signal(12, name=f"asked_pages_{index}")
        asked = Signal(name=f"asked_{index}")
        memory, nand = self._router.o_memory, self._router.o[index]
        m.d.comb += asked.eq(
            (memory.valid & memory.ready & (memory.payload.channel == index)) | (nand.valid & nand.ready)
        )
        # Asked and begun in one cycle cancel each other.
        m.d.sync += pages.eq(pages + asked - self._channels[index].events.page)
        return pages != 0
