"""Master reader: p of a command, whole or as the halves of a split master, from one memory port to groups of fp32.

    bus ─┬─ BurstReader ─ SizedNarrow (p, or weights) ─┬─ join ─ queue ─► o
         └─ BurstReader ─ SizedNarrow (rests) ─────────┘

Contract: a command of n parameters and a count of groups, ceil(n / lanes), give that many groups, the last one with
`last`. Lanes of the final group past the n-th parameter hold what lies behind it in memory, within the same beat.
Rests are read where the command is `split` only. Both readers' first bus error is kept, the first one's if both have
one.

Timing: one group a cycle while the port does not wait; back-pressure: yes.
Numerics: exact; equals nearflash.model.update.state.join_master to the bit.
"""

from typing import Any

from amaranth import Cat, Module, Mux, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.config import UpdateConfig
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.read import ReadEvents
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.stream.sized_gearbox import SizedNarrow
from nearflash.gateware.update.master_port import HALF_BITS, MasterCommand, master_gearboxes, master_movers
from nearflash.gateware.update.state_decoder import narrow_group

__all__ = ["MasterReader", "join_halves"]


def join_halves(weight: Value, rest: Value) -> Value:
    """The fp32 word of a weight and a rest: of a negative rest, the weight was rounded up."""
    return Cat(rest, (weight - rest[-1])[:HALF_BITS])


class MasterReader(wiring.Component):
    """Reads p.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    i_command : In stream of MasterCommand; its payload must stay as it is until `idle`.
    i_groups : In stream of unsigned(32), groups of the command.
    o : Out stream of struct {data: 32 bits a lane, last: 1}.
    bus : Out Axi4ReadSignature.
    clear : In, forgets errors. error : Out BusError. events : Out ReadEvents, the beats of both, else the first one's.
    idle : Out, both readers are idle.
    """

    def __init__(self, config: UpdateConfig) -> None:
        self.config = config
        super().__init__(
            {
                "i_command": In(stream.Signature(MasterCommand)),
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
        command = self.i_command.payload
        words, rests = master_movers(m, self, command, "r")
        wide, narrow = master_gearboxes(m, self.config, command, SizedNarrow)
        wiring.connect(m, words.o, wide.i)
        wiring.connect(m, rests.o, narrow.i)
        able = words.i_command.ready & (rests.i_command.ready | ~command.split)
        m.d.comb += [
            self.i_command.ready.eq(able),
            words.i_command.valid.eq(self.i_command.valid & able),
            rests.i_command.valid.eq(self.i_command.valid & able & command.split),
        ]
        self._count(m, wide, narrow, command.split)
        self._join(m, wide.o, narrow.o, command.split)
        return m

    def _count(self, m: Module, wide: SizedNarrow, narrow: SizedNarrow, split: Value) -> None:
        """The number of groups to both gearboxes, to that of the rests where there are some."""
        m.submodules.counts = counts = Fork(32, 2)
        wiring.connect(m, wiring.flipped(self.i_groups), counts.i)
        wiring.connect(m, counts.o[0], wide.i_count)
        m.d.comb += [
            narrow.i_count.payload.eq(counts.o[1].payload),
            narrow.i_count.valid.eq(counts.o[1].valid & split),
            counts.o[1].ready.eq(narrow.i_count.ready | ~split),
        ]

    def _join(self, m: Module, words: Any, rests: Any, split: Value) -> None:
        """A group leaves both gearboxes at once; a queue keeps their logic and the join of all arrays apart."""
        m.submodules.queue = queue = StreamQueue(narrow_group(self.config.lanes), 2)
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        whole, weights, rest = words.payload.data, words.payload.data, rests.payload.data
        joined = Cat(
            join_halves(weights.word_select(lane, HALF_BITS), rest.word_select(lane, HALF_BITS))
            for lane in range(self.config.lanes)
        )
        m.d.comb += [
            queue.i.valid.eq(words.valid & (rests.valid | ~split)),
            queue.i.payload.data.eq(Mux(split, joined, whole)),
            queue.i.payload.last.eq(words.payload.last),
            words.ready.eq(queue.i.ready & (rests.valid | ~split)),
            rests.ready.eq(queue.i.ready & words.valid),
        ]
