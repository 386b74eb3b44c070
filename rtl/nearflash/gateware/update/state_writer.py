"""State writer: groups of fp32 values of m or v, in any state format, through one memory port.

    i ─ StateEncoder ─┬─ SizedWiden (elements) ─ BurstWriter ─┬─ WriteArbiter ─ bus
                      └─ SizedWiden (scales) ── BurstWriter ──┘

Contract: exactly the bytes of the elements of strobed lanes are written, and the scales of blocks whose last group has
all of its lanes strobed. Scales are written in format mx8 only. Both writers' first bus error is kept, the elements'
one if both have one.

Timing: one group a cycle while the port does not wait; back-pressure: yes.
Numerics: those of StateEncoder.
"""

from amaranth import Cat, Module, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.optimizers.state import StateFormat
from nearflash.gateware.bus.axi import Axi4WriteSignature
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.bus.write import BurstWriter, WriteEvents
from nearflash.gateware.stream.sized_gearbox import SizedWiden
from nearflash.gateware.update.block_scale import state_group
from nearflash.gateware.update.dither import DitherCommand
from nearflash.gateware.update.state_encoder import StateEncoder
from nearflash.gateware.update.state_form import per_format
from nearflash.gateware.update.state_port import StateCommand, state_gearboxes, state_movers

__all__ = ["StateWriteCommand", "StateWriter"]


class StateWriteCommand(data.Struct):
    """Range to move, and where its dither begins."""

    state: StateCommand
    dither: DitherCommand


class StateWriter(wiring.Component):
    """Writes one array.

    Parameters
    ----------
    config : build configuration.
    role : the array, "m" or "v".

    Members
    -------
    i_command : In stream of StateWriteCommand; its payload must stay as it is until `idle`.
    i : In stream of `state_group`.
    bus : Out Axi4WriteSignature.
    clear : In, forgets errors. error : Out BusError. events : Out WriteEvents, the beats of both, else the elements'.
    idle : Out, both writers are idle.
    """

    def __init__(self, config: UpdateConfig, role: str) -> None:
        self.config, self._role = config, role
        super().__init__(
            {
                "i_command": In(stream.Signature(StateWriteCommand)),
                "i": In(stream.Signature(state_group(config.lanes))),
                "bus": Out(Axi4WriteSignature(config.port_bits)),
                "clear": In(1),
                "error": Out(BusError),
                "events": Out(WriteEvents),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A command goes to both writers and to the dither in the same cycle."""
        m = Module()
        config, command = self.config, self.i_command.payload.state
        elements, scales = state_movers(m, self, command, "w")
        groups, bytes_ = state_gearboxes(m, config, command, SizedWiden)
        m.submodules.encoder = encoder = StateEncoder(config.lanes, self._role)
        wiring.connect(m, wiring.flipped(self.i), encoder.i)
        wiring.connect(m, encoder.o_scale, bytes_.i)
        for gearbox, writer in ((groups, elements), (bytes_, scales)):
            m.d.comb += [
                writer.i.valid.eq(gearbox.o.valid),
                writer.i.payload.data.eq(gearbox.o.payload.data),
                writer.i.payload.strb.eq(gearbox.o.payload.strb),
                gearbox.o.ready.eq(writer.i.ready),
            ]

        self._command(m, elements, scales, encoder)
        m.d.comb += [
            encoder.form.eq(command.form),
            groups.i.valid.eq(encoder.o.valid),
            groups.i.payload.data.eq(encoder.o.payload.data),
            groups.i.payload.strb.eq(_bytes(encoder.o.payload.strb, command.form)),
            groups.i.payload.last.eq(encoder.o.payload.last),
            encoder.o.ready.eq(groups.i.ready),
        ]
        return m

    def _command(self, m: Module, elements: BurstWriter, scales: BurstWriter, encoder: StateEncoder) -> None:
        """Taken when all can take it."""
        able, mx8 = Signal(), self.i_command.payload.state.form == StateFormat.MX8.code
        m.d.comb += [
            # All or none: a part of them alone would have the command twice.
            able.eq(elements.i_command.ready & (scales.i_command.ready | ~mx8)),
            self.i_command.ready.eq(able),
            Cat(elements.i_command.valid, encoder.i_command.valid).eq((self.i_command.valid & able).replicate(2)),
            scales.i_command.valid.eq(self.i_command.valid & able & mx8),
            encoder.i_command.payload.eq(self.i_command.payload.dither),
        ]


def _bytes(strobes: Value, form: Value) -> Value:
    """Strobes of lanes as those of the bytes of their elements."""
    strobes_per_format = [Cat(strobe.replicate(each.element_bytes) for strobe in strobes) for each in StateFormat]
    return per_format(form, *strobes_per_format)
