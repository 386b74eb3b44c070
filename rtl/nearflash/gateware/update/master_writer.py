"""Master writer: groups of new p and of their weights, whole or as halves, through one memory port.

    i ─┬─ SizedWiden (p, or weights) ─ BurstWriter ─┬─ WriteArbiter ─ bus
       └─ SizedWiden (rests) ───────── BurstWriter ─┘

Contract: exactly the bytes of the command's strobed lanes are written: of p, or where the command is `split` of the
weights, and of the rests, p's lower halves. Both writers' first bus error is kept, the first one's if both have one.

Timing: one group a cycle while the port does not wait; back-pressure: yes.
"""

from typing import Any

from amaranth import Cat, Module, Mux
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.config import UpdateConfig
from nearflash.gateware.bus.axi import Axi4WriteSignature
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.bus.write import WriteEvents
from nearflash.gateware.stream.sized_gearbox import SizedWiden
from nearflash.gateware.update.master_port import HALF_BITS, MasterCommand, master_gearboxes, master_movers

__all__ = ["MasterWriter", "master_group"]


def master_group(lanes: int) -> data.StructLayout:
    """p and weights of `lanes` parameters, which of them are to be written, and whether the group is the last one."""
    return data.StructLayout({"p": 2 * HALF_BITS * lanes, "weights": HALF_BITS * lanes, "strb": lanes, "last": 1})


class MasterWriter(wiring.Component):
    """Writes p.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    i_command : In stream of MasterCommand; its payload must stay as it is until `idle`.
    i : In stream of `master_group`.
    bus : Out Axi4WriteSignature.
    clear : In, forgets errors. error : Out BusError. events : Out WriteEvents, the beats of both, else the first one's.
    idle : Out, both writers are idle.
    """

    def __init__(self, config: UpdateConfig) -> None:
        self.config = config
        super().__init__(
            {
                "i_command": In(stream.Signature(MasterCommand)),
                "i": In(stream.Signature(master_group(config.lanes))),
                "bus": Out(Axi4WriteSignature(config.port_bits)),
                "clear": In(1),
                "error": Out(BusError),
                "events": Out(WriteEvents),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A command goes to both writers in the same cycle, and so does a group to both gearboxes."""
        m = Module()
        command = self.i_command.payload
        words, rests = master_movers(m, self, command, "w")
        wide, narrow = master_gearboxes(m, self.config, command, SizedWiden)
        for gearbox, writer in ((wide, words), (narrow, rests)):
            m.d.comb += [
                writer.i.valid.eq(gearbox.o.valid),
                writer.i.payload.data.eq(gearbox.o.payload.data),
                writer.i.payload.strb.eq(gearbox.o.payload.strb),
                gearbox.o.ready.eq(writer.i.ready),
            ]
        able = words.i_command.ready & (rests.i_command.ready | ~command.split)
        m.d.comb += [
            # All or none: one of them alone would have the command twice.
            self.i_command.ready.eq(able),
            words.i_command.valid.eq(self.i_command.valid & able),
            rests.i_command.valid.eq(self.i_command.valid & able & command.split),
        ]
        self._divide(m, wide.i, narrow.i, command.split)
        return m

    def _divide(self, m: Module, words: Any, rests: Any, split: Any) -> None:
        group, lanes = self.i.payload, range(self.config.lanes)
        halves = Cat(bit.replicate(HALF_BITS // 8) for bit in group.strb)
        m.d.comb += [
            self.i.ready.eq(words.ready & (rests.ready | ~split)),
            words.valid.eq(self.i.valid & (rests.ready | ~split)),
            words.payload.data.eq(Mux(split, group.weights, group.p)),
            words.payload.strb.eq(Mux(split, halves, Cat(bit.replicate(HALF_BITS // 4) for bit in group.strb))),
            words.payload.last.eq(group.last),
            rests.valid.eq(self.i.valid & words.ready & split),
            rests.payload.data.eq(Cat(group.p.word_select(2 * lane, HALF_BITS) for lane in lanes)),
            rests.payload.strb.eq(halves),
            rests.payload.last.eq(group.last),
        ]
