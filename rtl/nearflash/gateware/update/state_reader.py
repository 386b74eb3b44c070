"""State reader: m or v of a command, in any state format, from one memory port to groups of fp32 values.

    bus ─┬─ BurstReader ─ SizedNarrow (elements) ─┬─ StateDecoder ─► o
         └─ BurstReader ─ SizedNarrow (scales) ───┘

Contract: a command of n parameters and a count of groups, ceil(n / lanes), give that many groups, the last one with
`last`. Lanes of the final group past the n-th parameter hold what lies behind it in memory, within the same beat.
Scales are read in format mx8 only. Both readers' first bus error is kept, the elements' one if both have one.

Timing: one group a cycle while the port does not wait; back-pressure: yes.
Numerics: those of StateDecoder.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.config import UpdateConfig
from nearflash.abi.formats import FP32
from nearflash.abi.rules.state import BLOCK_PARAMS, StateFormat
from nearflash.gateware.bus.arbiter import ReadArbiter
from nearflash.gateware.bus.axi import ADDRESS_BITS, Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader, ReadEvents
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.stream.gearbox import pieces
from nearflash.gateware.stream.sized_gearbox import SizedNarrow
from nearflash.gateware.update.block_scale import SCALE_BITS
from nearflash.gateware.update.element_encoder import FORM_BITS
from nearflash.gateware.update.state_decoder import StateDecoder, stored_group

__all__ = ["HALVINGS", "SCALE_BURSTS", "StateCommand", "StateReader", "element_beats", "scale_beats"]

#: fp32 elements halved once are as wide as bf16, twice as mx8: the register field's value.
HALVINGS = len(StateFormat) - 1
#: Bursts of scales under way, of one beat each.
SCALE_BURSTS = 4


class StateCommand(data.Struct):
    """Move m or v of `params` parameters, from or to byte addresses of the elements and of the scales.

    `form` is StateFormat.code. Elements begin at a multiple of what a group takes.
    """

    address: ADDRESS_BITS
    scale_address: ADDRESS_BITS
    params: 32
    form: FORM_BITS


def element_beats(command: Any, port_bytes: int) -> Value:
    """Beats of the elements of a StateCommand."""
    offset_bits = (port_bytes - 1).bit_length()
    widths = [command.params << HALVINGS - halved for halved in range(HALVINGS + 1)]
    size_bytes = Mux(command.form == 0, widths[0], Mux(command.form == 1, widths[1], widths[2]))
    return pieces(size_bytes + command.address[:offset_bits], port_bytes)


def scale_beats(command: Any, port_bytes: int) -> Value:
    """Beats of its scales."""
    offset_bits = (port_bytes - 1).bit_length()
    return pieces(pieces(command.params, BLOCK_PARAMS) + command.scale_address[:offset_bits], port_bytes)


class StateReader(wiring.Component):
    """Reads one array.

    Parameters
    ----------
    config : build configuration.
    role : the array, "m" or "v".

    Members
    -------
    i_command : In stream of StateCommand; its payload must stay as it is until `idle`.
    i_groups : In stream of unsigned(32), groups of the command.
    o : Out stream of struct {data: 32 bits a lane, last: 1}.
    bus : Out Axi4ReadSignature.
    clear : In, forgets errors. error : Out BusError. events : Out ReadEvents, the beats of both, else the elements'.
    idle : Out, both readers are idle.
    """

    def __init__(self, config: UpdateConfig, role: str) -> None:
        self.config, self._role = config, role
        super().__init__(
            {
                "i_command": In(stream.Signature(StateCommand)),
                "i_groups": In(stream.Signature(32)),
                "o": Out(stream.Signature(stored_group(config.lanes))),
                "bus": Out(Axi4ReadSignature(config.port_bits)),
                "clear": In(1),
                "error": Out(BusError),
                "events": Out(ReadEvents),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A command goes to both readers in the same cycle; what it means to the gearboxes stands until the next."""
        m = Module()
        config, command = self.config, self.i_command.payload
        limits = {"max_outstanding": config.outstanding_bursts, "max_burst_bytes": config.burst_bytes}
        few = {"max_outstanding": SCALE_BURSTS, "max_burst_bytes": config.port_bytes}
        m.submodules.arbiter = arbiter = ReadArbiter(
            2, config.port_bits, max_outstanding=config.outstanding_bursts + SCALE_BURSTS
        )
        m.submodules.elements = elements = BurstReader(config.port_bits, **limits)
        m.submodules.scales = scales = BurstReader(config.port_bits, **few)
        group_bits = FP32.bits * config.lanes
        m.submodules.groups = groups = SizedNarrow(group_bits, config.port_bits // group_bits, halvings=HALVINGS)
        m.submodules.bytes = bytes_ = SizedNarrow(SCALE_BITS, config.port_bytes)
        m.submodules.decoder = decoder = StateDecoder(config.lanes, self._role)
        wiring.connect(m, arbiter.bus, wiring.flipped(self.bus))
        for index, (reader, gearbox) in enumerate(((elements, groups), (scales, bytes_))):
            wiring.connect(m, reader.bus, arbiter.port[index])
            wiring.connect(m, reader.o, gearbox.i)
            m.d.comb += reader.clear.eq(self.clear)
        wiring.connect(m, wiring.flipped(self.i_groups), groups.i_count)
        wiring.connect(m, groups.o, decoder.i)
        wiring.connect(m, decoder.o, wiring.flipped(self.o))

        self._command(m, elements, scales, bytes_)
        m.d.comb += [
            decoder.form.eq(command.form),
            groups.halved.eq(command.form),
            groups.first.eq(command.address[config.lanes.bit_length() - 1 :]),
            bytes_.first.eq(command.scale_address),
            decoder.i_scale.payload.eq(bytes_.o.payload.data),
            decoder.i_scale.valid.eq(bytes_.o.valid),
            bytes_.o.ready.eq(decoder.i_scale.ready),
            self.idle.eq(elements.idle & scales.idle),
            self.error.eq(Mux(elements.error.seen, elements.error.as_value(), scales.error.as_value())),
            self.events.eq(elements.events),
            self.events.beat.eq(self.bus.rvalid & self.bus.rready),
        ]
        return m

    def _command(self, m: Module, elements: BurstReader, scales: BurstReader, bytes_: SizedNarrow) -> None:
        """Taken when all can take it."""
        command, port_bytes = self.i_command.payload, self.config.port_bytes
        able, mx8 = Signal(), command.form == StateFormat.MX8.code
        m.d.comb += [
            able.eq(elements.i_command.ready & (scales.i_command.ready & bytes_.i_count.ready | ~mx8)),
            self.i_command.ready.eq(able),
            elements.i_command.valid.eq(self.i_command.valid & able),
            elements.i_command.payload.address.eq(command.address),
            elements.i_command.payload.beats.eq(element_beats(command, port_bytes)),
            scales.i_command.payload.address.eq(command.scale_address),
            scales.i_command.payload.beats.eq(scale_beats(command, port_bytes)),
            bytes_.i_count.payload.eq(pieces(command.params, BLOCK_PARAMS)),
            Cat(scales.i_command.valid, bytes_.i_count.valid).eq((self.i_command.valid & able & mx8).replicate(2)),
        ]
