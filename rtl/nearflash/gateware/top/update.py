"""The `update` kernel: one step of an optimizer over parameters in device memory.

    s_axi_control ─ RegisterFile ─ Sequencer ──┬────────────┐
                         │                     ▼            ▼
    m_axi_gmem0..3 ─────────────────────────► Fetch ─ Pipeline ─ Store ─► m_axi_gmem0..3
                         └── scalars, program ────────┘        └─ counters

Ports: gmem0 reads gradients, dense or a Top-K stream that is expanded on the way, and writes the low-precision copy, or
in builds with deltas what this changes;
gmem1, gmem2 and gmem3 read and write p, m and v; in builds with split masters gmem1 both halves of p.
Contract: the registers of the build (nearflash.abi.registers.UPDATE), started as an XRT kernel (ap_ctrl_chain). Reads
run ahead of writes, so a range may be updated in place, but in and out ranges must not overlap otherwise. A fault in a
Top-K stream ends writing; results of tiles before it may have been written by then, so that a stream that is not known
to be good calls for outputs in a slot of their own, which is discarded.

Timing: W parameters a cycle while the memory keeps up; LATENCY of the pipeline and the memory on top, once a command.
Numerics: those of nearflash.gateware.update.lane.
"""

from amaranth import C, Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.registers import DELTA_BIT, SPLIT_BIT
from nearflash.abi.topk import StreamFault
from nearflash.gateware.bus.axi import Axi4Signature, connect_channels
from nearflash.gateware.bus.registers import RegisterFile
from nearflash.gateware.top.control import connect_control, connect_counters, control_members
from nearflash.gateware.update.fetch import INPUTS, Fetch
from nearflash.gateware.update.pipeline import UpdatePipeline
from nearflash.gateware.update.scalars import SCALARS, UpdateScalars
from nearflash.gateware.update.sequencer import Sequencer
from nearflash.gateware.update.store import Store

__all__ = ["UpdateKernel"]

_WIDE_EVENTS = {"params_done": 4, "nonfinite_gradients": 4, "copy_overflows": 4, "read_beats": 3, "write_beats": 3}


class UpdateKernel(wiring.Component):
    """Top of the update kernel.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    s_axi_control : In AxiLiteSignature, the register block.
    m_axi_gmem0 .. m_axi_gmem3 : Out Axi4Signature, `config.port_bits` wide.
    interrupt : Out, level.
    git_revision : In, first 32 bits of the git revision; tied by the board's wrapper, 0 in simulation.
    """

    def __init__(self, config: UpdateConfig) -> None:
        self.config = config
        ports = {f"m_axi_gmem{index}": Out(Axi4Signature(config.port_bits)) for index in range(config.ports)}
        super().__init__(control_members(config.registers, ports))

    def elaborate(self, platform: object) -> Module:
        """Control on one side, data on the other; counters look at both."""
        m = Module()
        m.submodules.registers = registers = RegisterFile(self.config.registers)
        m.submodules.sequencer = sequencer = Sequencer(self.config, registers.values.shape())
        m.submodules.scalars = scalars = UpdateScalars()
        m.submodules.fetch = fetch = Fetch(self.config)
        m.submodules.pipeline = pipeline = UpdatePipeline(
            self.config.lanes, delta=self.config.delta, masters=len(self.config.masters) > 1
        )
        m.submodules.store = store = Store(self.config)

        # Control.
        connect_control(m, self, registers, sequencer)
        wiring.connect(m, sequencer.fetch, fetch.i_command)
        wiring.connect(m, sequencer.store, store.i_command)
        m.d.comb += [
            sequencer.stream_fault.eq(fetch.fault),
            sequencer.fetch_idle.eq(fetch.idle),
            sequencer.store_idle.eq(store.idle),
            fetch.clear.eq(sequencer.clear),
            store.clear.eq(sequencer.clear),
        ]
        for port in range(self.config.ports):
            m.d.comb += [
                sequencer.fetch_error[port].eq(fetch.error[port]),
                sequencer.store_error[port].eq(store.error[port]),
            ]

        # Data.
        wiring.connect(m, fetch.o, pipeline.i)
        wiring.connect(m, pipeline.o, store.i)
        program = registers.values.program
        absent = Cat(C(0, 2), program.m_absent, program.v_absent)
        m.d.comb += [pipeline.program.eq(program), fetch.absent.eq(absent), store.absent.eq(absent)]
        if self.config.delta:
            m.d.comb += [
                store.delta.eq(program.as_value()[DELTA_BIT]),
                store.value_format.eq(program.copy_format),  # the same numbers
            ]
        if len(self.config.masters) > 1:
            m.d.comb += [part.split.eq(program.as_value()[SPLIT_BIT]) for part in (fetch, pipeline, store)]
            m.d.comb += fetch.rest_address.eq(registers.values.rest_address)
            m.d.comb += store.rest_address.eq(registers.values.rest_out_address)
        m.d.sync += store.discard.eq(fetch.fault != StreamFault.NONE)  # long before what came after the fault
        m.d.sync += pipeline.scalars.eq(scalars.o)  # a register for their way to all lanes
        for name in (*SCALARS, "denominator_factor"):
            m.d.comb += getattr(scalars.i, name).eq(registers.values[name])
        for port in range(self.config.ports):
            for part in (fetch, store):
                connect_channels(m, part.bus[port], getattr(self, f"m_axi_gmem{port}"))

        self._count(m, registers, sequencer, fetch, pipeline, store)
        return m

    def _count(
        self,
        m: Module,
        registers: RegisterFile,
        sequencer: Sequencer,
        fetch: Fetch,
        pipeline: UpdatePipeline,
        store: Store,
    ) -> None:
        busy = Signal()
        m.d.comb += busy.eq(~fetch.idle)
        events = {
            "cycles": 1,
            "params_done": store.counts.params,
            "nonfinite_gradients": store.counts.nonfinite_gradients,
            "copy_overflows": store.counts.copy_overflows,
            "read_beats": sum(event.beat for event in fetch.events),
            "write_beats": sum(event.beat for event in store.events),
            **{f"wait_{name}_cycles": busy & fetch.wait[index] for index, name in enumerate(INPUTS)},
            "wait_write_cycles": fetch.o.valid & ~pipeline.i.ready,
        }
        connect_counters(m, registers, sequencer, events, _WIDE_EVENTS)
