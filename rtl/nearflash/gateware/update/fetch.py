"""Fetch: reads gradients and state from four memory ports and joins them into groups of lanes.

    gmem0 ─ BurstReader ─ Narrow ─ g ─┐
    gmem1 ─ BurstReader ─ Narrow ─ p ─┼─ Join ─► o
    gmem2 ─ BurstReader ─ Narrow ─ m ─┤
    gmem3 ─ BurstReader ─ Narrow ─ v ─┘

Contract: a command of n parameters gives ceil(n / lanes) groups, the final one with `last`. Lanes of the final group
past the n-th parameter hold what lies behind it in memory, within the same beat.

Timing: one group a cycle while no port waits; back-pressure: yes.
"""

from amaranth import Cat, Module, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.config import UpdateConfig
from nearflash.abi.formats import FP32
from nearflash.gateware.bus.axi import ADDRESS_BITS, Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader, ReadEvents
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.gearbox import Narrow
from nearflash.gateware.stream.join import Join
from nearflash.gateware.stream.skid import SkidBuffer
from nearflash.gateware.update.pipeline import input_group

__all__ = ["INPUTS", "Fetch", "FetchCommand", "pieces"]

INPUTS = ("g", "p", "m", "v")
"""Streams read, in the order of the memory ports."""


def pieces(params: Value, each: int) -> Value:
    """ceil(params / each) for a power of two."""
    return (params + (each - 1)) >> (each.bit_length() - 1)


class FetchCommand(data.Struct):
    """Read `params` parameters from four byte addresses, each a multiple of the port width."""

    address: data.ArrayLayout(ADDRESS_BITS, len(INPUTS))
    params: 32


class Fetch(wiring.Component):
    """Four readers and their join.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    i_command : In stream of FetchCommand.
    o : Out stream of `input_group`.
    bus : array of four Out Axi4ReadSignature, in the order of INPUTS.
    clear : In, forgets errors. error : array of four Out BusError.
    events : array of four Out ReadEvents. wait : Out, bit k: the join waits for stream k.
    idle : Out, all readers are idle.
    """

    def __init__(self, config: UpdateConfig) -> None:
        self.config = config
        count = len(INPUTS)
        super().__init__(
            {
                "i_command": In(stream.Signature(FetchCommand)),
                "o": Out(stream.Signature(input_group(config.lanes))),
                "bus": Out(Axi4ReadSignature(config.port_bits)).array(count),
                "clear": In(1),
                "error": Out(BusError).array(count),
                "events": Out(ReadEvents).array(count),
                "wait": Out(count),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The command goes to each reader (in beats) and to each gearbox (in groups)."""
        m = Module()
        config, count = self.config, len(INPUTS)
        group_bits = FP32.bits * config.lanes
        group = data.StructLayout({"data": group_bits, "last": 1})
        m.submodules.commands = commands = Fork(FetchCommand, count + 1)
        m.submodules.groups = groups = SkidBuffer(32)  # between the adder and the gearboxes, and their ready
        m.submodules.counts = counts = Fork(32, count)
        m.submodules.join = join = Join(dict.fromkeys(INPUTS, group))
        wiring.connect(m, wiring.flipped(self.i_command), commands.i)
        wiring.connect(m, groups.o, counts.i)
        m.d.comb += [
            groups.i.valid.eq(commands.o[count].valid),
            groups.i.payload.eq(pieces(commands.o[count].payload.params, config.lanes)),
            commands.o[count].ready.eq(groups.i.ready),
        ]
        idle = []
        for index, name in enumerate(INPUTS):
            reader = m.submodules[f"read_{name}"] = BurstReader(
                config.port_bits, max_outstanding=config.outstanding_bursts, max_burst_bytes=config.burst_bytes
            )
            narrow = m.submodules[f"narrow_{name}"] = Narrow(group_bits, config.port_bits // group_bits)
            to_reader = commands.o[index]
            m.d.comb += [
                reader.i_command.valid.eq(to_reader.valid),
                reader.i_command.payload.address.eq(to_reader.payload.address[index]),
                reader.i_command.payload.beats.eq(pieces(to_reader.payload.params, config.port_bytes // FP32.bytes)),
                to_reader.ready.eq(reader.i_command.ready),
                reader.clear.eq(self.clear),
                self.error[index].eq(reader.error),
                self.events[index].eq(reader.events),
                self.wait[index].eq(self.o.ready & ~narrow.o.valid),
            ]
            wiring.connect(m, reader.bus, wiring.flipped(self.bus[index]))
            wiring.connect(m, counts.o[index], narrow.i_count)
            wiring.connect(m, reader.o, narrow.i)
            wiring.connect(m, narrow.o, getattr(join.i, name))
            idle.append(reader.idle)

        m.d.comb += [
            self.idle.eq(Cat(idle).all()),
            self.o.valid.eq(join.o.valid),
            join.o.ready.eq(self.o.ready),
            self.o.payload.last.eq(join.o.payload.g.last),
        ]
        for lane in range(config.lanes):
            for name in INPUTS:
                word = join.o.payload[name].data.word_select(lane, FP32.bits)
                m.d.comb += self.o.payload.lanes[lane][name].eq(word)
        return m
