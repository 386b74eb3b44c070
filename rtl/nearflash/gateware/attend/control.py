"""Control of the attend kernel: from descriptor indices to page requests, and from Done to finish commands.

    index ─► Prepare ──────────► ContextTable ─► o_select, o_finish
                │ plan, mask       ▲ Done, alpha, finished
                ├─► ScanWalker ────┤ ends
                └─► TokenWalker ◄──┘                  Merge
                     ▲ start, mask          ScanWalker, TokenWalker ─► RequestRouter ─► o (NAND), o_memory

Contract: that of the parts. All read one memory port through a ReadArbiter.

Timing: that of the parts; back-pressure: yes. The selection must take scores also while its mask waits: a mask waits for
requests, and requests for channels that may wait for their scores to be taken.
"""

from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.config import AttendConfig
from nearflash.gateware.attend.contexts import ContextTable, PhaseCounts
from nearflash.gateware.attend.plan import ScanPlan
from nearflash.gateware.attend.prepare import Prepare
from nearflash.gateware.attend.router import RequestRouter
from nearflash.gateware.attend.scan import ScanWalker
from nearflash.gateware.attend.tokens import TokenWalker
from nearflash.gateware.attn.interfaces import (
    CONTEXT_BITS,
    Alpha,
    ContextRecord,
    Done,
    FinishCommand,
    GatherStart,
    GatherWrite,
    MaskBeat,
    PageRequest,
    RoutedRequest,
    ScaleWrite,
    SelectCommand,
    query_write,
)
from nearflash.gateware.bus.arbiter import ReadArbiter
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["AttendControl"]

_MASK_BEATS = 64


class AttendControl(wiring.Component):
    """Everything between the descriptors and the channels' requests.

    Parameters
    ----------
    config : build configuration; its port must be 64 bits wide.

    Members
    -------
    start : In, pulse before a batch. descriptors_address, contexts, watchdog : In, as in the registers; they hold still.
    memory_error : In, some other unit of the batch has seen a bus error.
    i : In stream of descriptor indices, 32 bits.
    record_valid, record : Out, broadcast of ContextRecord. query_valid, query : of query_write(G).
    scale_valid, scale : of ScaleWrite. gather_valid, gather : of GatherWrite.
    o : array of `config.channels` Out streams of PageRequest, to NAND. o_memory : Out stream of RoutedRequest.
    i_done : array of `config.channels` In streams of Done.
    o_select : Out stream of SelectCommand. i_start, i_mask, i_alpha : In streams of GatherStart, MaskBeat, Alpha.
    o_finish : Out stream of FinishCommand. i_finished : In stream of contexts whose completion is written.
    bus : Out Axi4ReadSignature. error : array of three Out BusError (Prepare, ScanWalker, TokenWalker).
    preparing : Out, a head is in preparation. phases : Out PhaseCounts. expired : Out, the watchdog has struck.
    """

    def __init__(self, config: AttendConfig) -> None:
        self.config = config
        super().__init__(
            {
                "start": In(1),
                "descriptors_address": In(64),
                "contexts": In(CONTEXT_BITS + 1),
                "watchdog": In(32),
                "memory_error": In(1),
                "i": In(stream.Signature(32)),
                "record_valid": Out(1),
                "record": Out(ContextRecord),
                "query_valid": Out(1),
                "query": Out(query_write(config.heads_per_beat)),
                "scale_valid": Out(1),
                "scale": Out(ScaleWrite),
                "gather_valid": Out(1),
                "gather": Out(GatherWrite),
                "o": Out(stream.Signature(PageRequest)).array(config.channels),
                "o_memory": Out(stream.Signature(RoutedRequest)),
                "i_done": In(stream.Signature(Done)).array(config.channels),
                "o_select": Out(stream.Signature(SelectCommand)),
                "i_start": In(stream.Signature(GatherStart)),
                "i_mask": In(stream.Signature(MaskBeat)),
                "i_alpha": In(stream.Signature(Alpha)),
                "o_finish": Out(stream.Signature(FinishCommand)),
                "i_finished": In(stream.Signature(CONTEXT_BITS)),
                "bus": Out(Axi4ReadSignature(config.port_bits)),
                "error": Out(BusError).array(3),
                "preparing": Out(1),
                "phases": Out(PhaseCounts),
                "expired": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The parts, then their wires from left to right."""
        m = Module()
        m.submodules.prepare = prepare = Prepare(self.config)
        m.submodules.table = table = ContextTable(self.config)
        m.submodules.scan = scan = ScanWalker(self.config)
        m.submodules.tokens = tokens = TokenWalker(self.config)
        m.submodules.router = router = RequestRouter(self.config)
        m.submodules.arbiter = arbiter = ReadArbiter(3, self.config.port_bits)
        m.submodules.plans = plans = StreamQueue(ScanPlan, 2)
        m.submodules.masks = masks = StreamQueue(MaskBeat, _MASK_BEATS)

        # Prepare: registers, contexts, broadcasts, plans.
        wiring.connect(m, wiring.flipped(self.i), prepare.i)
        wiring.connect(m, table.o_free, prepare.i_context)
        wiring.connect(m, prepare.o, table.i)
        wiring.connect(m, prepare.o_scan, plans.i)
        wiring.connect(m, prepare.o_mask, masks.i)
        wiring.connect(m, plans.o, scan.i)
        wiring.connect(m, masks.o, scan.i_mask)
        for name in ("record", "query", "scale"):
            m.d.comb += getattr(self, name).eq(getattr(prepare, name))
            m.d.comb += getattr(self, f"{name}_valid").eq(getattr(prepare, f"{name}_valid"))
        plan = prepare.o.payload
        m.d.comb += [
            prepare.descriptors_address.eq(self.descriptors_address),
            prepare.contexts.eq(self.contexts),
            prepare.expired.eq(table.expired),
            self.preparing.eq(~prepare.idle),
            tokens.plan_valid.eq(prepare.o.valid & prepare.o.ready),
            tokens.plan_context.eq(plan.select.context),
            tokens.plan.eq(plan.token),
        ]

        # Table: phases of the heads.
        for name in ("tail", "dense"):
            wiring.connect(m, getattr(table, f"o_{name}"), getattr(tokens, f"i_{name}"))
        wiring.connect(m, table.o_slot, tokens.i_slot)
        for index, walker in enumerate((scan, tokens)):
            wiring.connect(m, walker.o_end, table.i_end[index])
            wiring.connect(m, walker.o, router.i[index])
        for name in ("i_alpha", "i_finished"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(table, name))
        for name in ("o_select", "o_finish"):
            wiring.connect(m, getattr(table, name), wiring.flipped(getattr(self, name)))
        seen = [part.error.seen for part in (prepare, scan, tokens)]
        m.d.comb += [
            table.start.eq(self.start),
            table.contexts.eq(self.contexts),
            table.watchdog.eq(self.watchdog),
            table.memory_error.eq(self.memory_error | seen[0] | seen[1] | seen[2]),
            self.phases.eq(table.phases),
            self.expired.eq(table.expired),
            scan.credit_valid.eq(table.credit_valid),
            scan.credit.eq(table.credit),
        ]

        # Walkers: masks in, requests out.
        for name in ("i_start", "i_mask"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(tokens, name))
        wiring.connect(m, router.o_memory, wiring.flipped(self.o_memory))
        for index in range(self.config.channels):
            wiring.connect(m, router.o[index], wiring.flipped(self.o[index]))
            wiring.connect(m, wiring.flipped(self.i_done[index]), table.i_done[index])
        m.d.comb += [self.gather_valid.eq(tokens.gather_valid), self.gather.eq(tokens.gather)]

        # Memory.
        wiring.connect(m, arbiter.bus, wiring.flipped(self.bus))
        for index, part in enumerate((prepare, scan, tokens)):
            wiring.connect(m, part.bus, arbiter.port[index])
            m.d.comb += [part.clear.eq(self.start), self.error[index].eq(part.error)]
        return m
