"""State reader: m or v of a command, in any state format, from one memory port to groups of fp32 values.

    bus ─┬─ BurstReader ─ SizedNarrow (elements) ─ SkidBuffer ─┬─ StateDecoder ─► o
         └─ BurstReader ─ SizedNarrow (scales) ─── HalfBuffer ─┘

Contract: a command of n parameters and a count of groups, ceil(n / lanes), give that many groups, the last one with
`last`. Lanes of the final group past the n-th parameter hold what lies behind it in memory, within the same beat.
Scales are read in format mx8 only. Both readers' first bus error is kept, the elements' one if both have one.

Timing: one group a cycle while the port does not wait; back-pressure: yes.
Numerics: those of StateDecoder.
"""

from typing import Any

from amaranth import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.optimizers.state import BLOCK_PARAMS, StateFormat
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader, ReadEvents
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.stream.gearbox import pieces
from nearflash.gateware.stream.half import HalfBuffer
from nearflash.gateware.stream.sized_gearbox import SizedNarrow
from nearflash.gateware.stream.skid import SkidBuffer
from nearflash.gateware.update.block_scale import SCALE_BITS
from nearflash.gateware.update.state_decoder import StateDecoder, narrow_group
from nearflash.gateware.update.state_port import StateCommand, state_gearboxes, state_movers

__all__ = ["StateReader"]


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
                "o": Out(stream.Signature(narrow_group(config.lanes))),
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
        elements, scales = state_movers(m, self, command, "r")
        groups, bytes_ = state_gearboxes(m, config, command, SizedNarrow)
        m.submodules.decoder = decoder = StateDecoder(config.lanes, self._role)
        # What the decoder takes hangs on the groups of all arrays: a long way, which ends here.
        m.submodules.stored = stored = SkidBuffer(narrow_group(config.lanes))
        m.submodules.scale = scale = HalfBuffer(SCALE_BITS)
        wiring.connect(m, elements.o, groups.i)
        wiring.connect(m, scales.o, bytes_.i)
        wiring.connect(m, wiring.flipped(self.i_groups), groups.i_count)
        m.submodules.blocks = blocks = HalfBuffer(32)  # from the adder to what the count of scales tells
        wiring.connect(m, blocks.o, bytes_.i_count)
        wiring.connect(m, groups.o, stored.i)
        wiring.connect(m, stored.o, decoder.i)
        wiring.connect(m, scale.o, decoder.i_scale)
        wiring.connect(m, decoder.o, wiring.flipped(self.o))

        self._command(m, elements, scales, blocks.i)
        m.d.comb += [
            decoder.form.eq(command.form),
            scale.i.payload.eq(bytes_.o.payload.data),
            scale.i.valid.eq(bytes_.o.valid),
            bytes_.o.ready.eq(scale.i.ready),
        ]
        return m

    def _command(self, m: Module, elements: BurstReader, scales: BurstReader, blocks: Any) -> None:
        """Taken when all can take it."""
        command = self.i_command.payload
        able, mx8 = Signal(), command.form == StateFormat.MX8.code
        m.d.comb += [
            able.eq(elements.i_command.ready & (scales.i_command.ready & blocks.ready | ~mx8)),
            self.i_command.ready.eq(able),
            elements.i_command.valid.eq(self.i_command.valid & able),
            blocks.payload.eq(pieces(command.params, BLOCK_PARAMS)),
            Cat(scales.i_command.valid, blocks.valid).eq((self.i_command.valid & able & mx8).replicate(2)),
        ]
