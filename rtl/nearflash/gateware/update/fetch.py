"""Fetch: reads gradients and state from four memory ports and joins them into groups of lanes.

    gmem0 ─ BurstReader ─ GradientSource ─ g ─ queue ─┐
    gmem1 ─ BurstReader ─ Narrow ───────── p ─ queue ─┼─ Join ─► o
    gmem2 ─ BurstReader ─ Narrow ───────── m ─ queue ─┤
    gmem3 ─ BurstReader ─ Narrow ───────── v ─ queue ─┘

In a build with narrow state formats m and v come through a StateReader each, without a queue behind it; in one with
split masters p comes through a MasterReader.

Contract: a command of n parameters gives ceil(n / lanes) groups, the final one with `last`. Lanes of the final group
past the n-th parameter hold what lies behind it in memory, within the same beat. Of a bad Top-K stream `fault` tells;
the groups still come, with gradients of zero.

Timing: one group a cycle while no port waits; back-pressure: yes.
"""

from typing import Any

from amaranth import Cat, Module, Mux
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.topk import WORD_BYTES, StreamFault
from nearflash.gateware.bus.axi import ADDRESS_BITS, Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader, ReadEvents
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.gearbox import Narrow, pieces
from nearflash.gateware.stream.half import HalfBuffer
from nearflash.gateware.stream.join import Join
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.update.gradient import GradientCommand, GradientSource
from nearflash.gateware.update.master_reader import MasterReader
from nearflash.gateware.update.pipeline import input_group
from nearflash.gateware.update.state_form import FORM_BITS
from nearflash.gateware.update.state_reader import StateReader

__all__ = ["INPUTS", "STATES", "Fetch", "FetchCommand"]

INPUTS = ("g", "p", "m", "v")
"""Streams read, in the order of the memory ports."""
STATES = INPUTS[2:]
"""Of these, what may be stored in a narrow format."""


class FetchCommand(data.Struct):
    """Read `params` parameters from four byte addresses, each a multiple of the port width, or of what so many fp32
    words are in the state format, StateFormat.code `form`; scales from any of m and v.

    With `topk`, gradients are a stream of `stream_bytes` bytes.
    """

    address: data.ArrayLayout(ADDRESS_BITS, len(INPUTS))
    scale_address: data.ArrayLayout(ADDRESS_BITS, len(STATES))
    params: 32
    stream_bytes: 32
    topk: 1
    form: FORM_BITS


class Fetch(wiring.Component):
    """Four readers and their join.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    i_command : In stream of FetchCommand; its payload must stay as it is until `idle`.
    o : Out stream of `input_group`.
    bus : array of four Out Axi4ReadSignature, in the order of INPUTS.
    absent : In, bit k: stream k is not read, its words are zero; must stay as it is until `idle`. Not for g.
    clear : In, forgets errors. error : array of four Out BusError.
    events : array of four Out ReadEvents. wait : Out, bit k: the join waits for stream k.
    fault : Out, StreamFault of the gradients; stands until the next command.
    idle : Out, all readers and the gradient source are idle, and the queues empty.
    split, rest_address : In, in builds with split masters: p's address is that of its weights, and the rests are there;
        both must stay as they are until `idle`.
    """

    def __init__(self, config: UpdateConfig) -> None:
        self.config = config
        count = len(INPUTS)
        super().__init__(
            {
                "i_command": In(stream.Signature(FetchCommand)),
                "o": Out(stream.Signature(input_group(config.lanes))),
                "bus": Out(Axi4ReadSignature(config.port_bits)).array(count),
                "absent": In(count),
                "clear": In(1),
                "error": Out(BusError).array(count),
                "events": Out(ReadEvents).array(count),
                "wait": Out(count),
                "fault": Out(StreamFault),
                "idle": Out(1),
                **({"split": In(1), "rest_address": In(ADDRESS_BITS)} if len(config.masters) > 1 else {}),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The command goes to each reader (in beats), to each gearbox and to the gradient source (in groups)."""
        m = Module()
        config, count = self.config, len(INPUTS)
        group = data.StructLayout({"data": FP32.bits * config.lanes, "last": 1})
        m.submodules.commands = commands = Fork(FetchCommand, count + 1)
        m.submodules.groups = groups = HalfBuffer(GradientCommand)  # from the adder to the gearboxes
        m.submodules.counts = counts = Fork(GradientCommand, count)
        m.submodules.join = join = Join(dict.fromkeys(INPUTS, group))
        wiring.connect(m, wiring.flipped(self.i_command), commands.i)
        wiring.connect(m, groups.o, counts.i)
        to_groups = commands.o[count]
        m.d.comb += [
            groups.i.valid.eq(to_groups.valid),
            groups.i.payload.groups.eq(pieces(to_groups.payload.params, config.lanes)),
            *(groups.i.payload[name].eq(to_groups.payload[name]) for name in ("params", "stream_bytes", "topk")),
            to_groups.ready.eq(groups.i.ready),
        ]
        m.submodules.gradient = gradient = GradientSource(config)
        wiring.connect(m, counts.o[0], gradient.i_command)
        m.d.comb += self.fault.eq(gradient.fault)
        idle = [gradient.idle]
        for index, name in enumerate(INPUTS):
            if name in STATES and len(config.state_formats) > 1:
                reader = source = self._read_state(m, index, name, commands.o[index])
                self._count(m, index, name, counts.o[index], source.i_groups)
            elif name == "p" and len(config.masters) > 1:
                reader = source = self._read_master(m, index, commands.o[index])
                self._count(m, index, name, counts.o[index], source.i_groups)
            else:
                reader = self._read(m, index, name, commands.o[index])
                source = self._narrow(m, index, name, counts.o[index]) if index else gradient
                wiring.connect(m, reader.o, source.i)
            wiring.connect(m, reader.bus, wiring.flipped(self.bus[index]))
            m.d.comb += [
                reader.clear.eq(self.clear),
                self.error[index].eq(reader.error),
                self.events[index].eq(reader.events),
            ]
            shown = source.o
            idle.append(reader.idle)
            if reader is not source:  # the groups of a StateReader, or a MasterReader, come from registers
                shown = self._queue(m, name, source.o)
                # A queue that is not empty still has groups of this command.
                idle.append(~shown.valid)
            self._present(m, index, shown, getattr(join.i, name))

        m.d.comb += [
            self.idle.eq(Cat(idle).all()),
            self.o.valid.eq(join.o.valid),
            join.o.ready.eq(self.o.ready),
            # All arrays have as many groups: the end of one is that of all.
            self.o.payload.last.eq(join.o.payload.g.last),
        ]
        for lane in range(config.lanes):
            for index, name in enumerate(INPUTS):
                word = join.o.payload[name].data.word_select(lane, FP32.bits)
                # Whatever an absent array's queue shows counts as zeros.
                m.d.comb += self.o.payload.lanes[lane][name].eq(word & ~self.absent[index].replicate(FP32.bits))
        return m

    def _read(self, m: Module, index: int, name: str, command: Any) -> BurstReader:
        """Reader of one input: beats of fp32 words, or of a gradient stream."""
        config = self.config
        reader = m.submodules[f"read_{name}"] = BurstReader(
            config.port_bits, max_outstanding=config.outstanding_bursts, max_burst_bytes=config.burst_bytes
        )
        beats = pieces(command.payload.params, config.port_bytes // FP32.bytes)
        if name == "g" and "topk" in config.gradients:
            words = command.payload.stream_bytes[WORD_BYTES.bit_length() - 1 :]  # whole ones, as the source takes
            beats = Mux(command.payload.topk, pieces(words, config.port_bytes // WORD_BYTES), beats)
        m.d.comb += [
            # The copy for an absent array is taken at once (`ready` below): a fork waits for the last one.
            reader.i_command.valid.eq(command.valid & ~self.absent[index]),
            reader.i_command.payload.address.eq(command.payload.address[index]),
            reader.i_command.payload.beats.eq(beats),
            command.ready.eq(reader.i_command.ready | self.absent[index]),
        ]
        return reader

    def _read_state(self, m: Module, index: int, name: str, command: Any) -> StateReader:
        """Reader of m or v, which sees no command where the array is absent."""
        reader = m.submodules[f"read_{name}"] = StateReader(self.config, name)
        wanted = ~self.absent[index]
        m.d.comb += [
            reader.i_command.payload.address.eq(command.payload.address[index]),
            reader.i_command.payload.scale_address.eq(command.payload.scale_address[STATES.index(name)]),
            reader.i_command.payload.params.eq(command.payload.params),
            reader.i_command.payload.form.eq(command.payload.form),
            reader.i_command.valid.eq(command.valid & wanted),
            command.ready.eq(reader.i_command.ready | ~wanted),
        ]
        return reader

    def _read_master(self, m: Module, index: int, command: Any) -> MasterReader:
        """Reader of p, whole or in halves."""
        reader = m.submodules.read_p = MasterReader(self.config)
        m.d.comb += [
            reader.i_command.payload.address.eq(command.payload.address[index]),
            reader.i_command.payload.rest_address.eq(self.rest_address),
            reader.i_command.payload.params.eq(command.payload.params),
            reader.i_command.payload.split.eq(self.split),
            reader.i_command.valid.eq(command.valid),
            command.ready.eq(reader.i_command.ready),
        ]
        return reader

    def _narrow(self, m: Module, index: int, name: str, command: Any) -> Narrow:
        """Gearbox of one array."""
        group_bits = FP32.bits * self.config.lanes
        narrow = m.submodules[f"narrow_{name}"] = Narrow(group_bits, self.config.port_bits // group_bits)
        self._count(m, index, name, command, narrow.i_count)
        return narrow

    def _count(self, m: Module, index: int, name: str, command: Any, count: Any) -> None:
        """The number of groups to one array's gearbox, whose ready hangs on the join; to none where it is absent."""
        m.submodules[f"count_{name}"] = buffer = HalfBuffer(32)
        wiring.connect(m, buffer.o, count)
        m.d.comb += [
            buffer.i.payload.eq(command.payload.groups),
            buffer.i.valid.eq(command.valid & ~self.absent[index]),
            command.ready.eq(buffer.i.ready | self.absent[index]),
        ]

    def _queue(self, m: Module, name: str, groups: Any) -> Any:
        """A queue between one array's gearbox and the join, which keeps their logic apart."""
        queue = m.submodules[f"queue_{name}"] = StreamQueue(groups.payload.shape(), 2)
        wiring.connect(m, groups, queue.i)
        return queue.o

    def _present(self, m: Module, index: int, groups: Any, joined: Any) -> None:
        """Groups to the join; of an absent array there is always one."""
        m.d.comb += [
            joined.payload.eq(groups.payload),
            joined.valid.eq(groups.valid | self.absent[index]),
            groups.ready.eq(joined.ready),
            self.wait[index].eq(self.o.ready & ~joined.valid),
        ]
