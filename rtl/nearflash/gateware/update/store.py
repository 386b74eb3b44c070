"""Store: writes new state and the low-precision copy through four memory ports.

          ┌─ Widen ─ BurstWriter ─ gmem1 (p)
    i ─ Fork ─ Widen ─ BurstWriter ─ gmem2 (m)
          ├─ Widen ─ BurstWriter ─ gmem3 (v)
          └─ Widen ─ BurstWriter ─ gmem0 (copy, when asked for; or DeltaPacker in the place of Widen)

In a build with narrow state formats m and v go through a StateWriter each, in one with split masters p goes through a
MasterWriter.

Contract: exactly the bytes of the command's n parameters are written, whatever n: lanes past the n-th are not strobed.
Of groups taken while `discard` is set nothing is written: their beats go out without strobes.

Timing: one group a cycle while no port waits; back-pressure: yes.
"""

from collections.abc import Iterator
from typing import Any

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP16, FP32
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.topk import WORD_BYTES, ValueFormat
from nearflash.gateware.bus.axi import ADDRESS_BITS, Axi4WriteSignature
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.bus.write import BurstWriter, WriteEvents
from nearflash.gateware.gradients.delta import DeltaPacker
from nearflash.gateware.gradients.delta_beats import BeatsCommand, DeltaBeats
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.gearbox import Widen, pieces
from nearflash.gateware.stream.half import HalfBuffer
from nearflash.gateware.update.dither import DitherCommand
from nearflash.gateware.update.fetch import STATES
from nearflash.gateware.update.master_writer import MasterWriter
from nearflash.gateware.update.pipeline import output_group
from nearflash.gateware.update.state_form import FORM_BITS
from nearflash.gateware.update.state_writer import StateWriter

__all__ = ["OUTPUTS", "Store", "StoreCommand", "StoreEvents"]

OUTPUTS = ("copy", "p", "m", "v")
"""Streams written, in the order of the memory ports."""


class StoreCommand(data.Struct):
    """Write `params` parameters to byte addresses, each a multiple of the port width, or of what so many fp32 words
    are in the state format, StateFormat.code `form`; scales to any of m and v. `copy`: the copy too.
    """

    address: data.ArrayLayout(ADDRESS_BITS, len(OUTPUTS))
    scale_address: data.ArrayLayout(ADDRESS_BITS, len(STATES))
    params: 32
    copy: 1
    form: FORM_BITS
    dither: DitherCommand


class StoreEvents(data.Struct):
    """Events of this cycle, for counters: parameters taken, and how many of them were special."""

    params: 4
    nonfinite_gradients: 4
    copy_overflows: 4


class Store(wiring.Component):
    """Four writers behind a fork.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    i_command : In stream of StoreCommand; its payload must stay as it is until `idle`.
    i : In stream of `output_group`.
    bus : array of four Out Axi4WriteSignature, in the order of OUTPUTS.
    absent : In, bit k: output k is not written; must stay as it is until `idle`. Not for the copy.
    discard : In. clear : In, forgets errors. error : array of four Out BusError.
    events : array of four Out WriteEvents. counts : Out StoreEvents.
    idle : Out, all writers are idle.
    delta, value_format : In, in builds with deltas: what the copy changes is written in its place, in that format; both
        must stay as they are until `idle`.
    split, rest_address : In, in builds with split masters: what is written of p are its weights, which come in the
        place of the copy, and, to an address of their own, the rests; both must stay as they are until `idle`.
    """

    def __init__(self, config: UpdateConfig) -> None:
        self.config = config
        count = len(OUTPUTS)
        super().__init__(
            {
                "i_command": In(stream.Signature(StoreCommand)),
                "i": In(stream.Signature(output_group(config.lanes, delta=config.delta))),
                "bus": Out(Axi4WriteSignature(config.port_bits)).array(count),
                "absent": In(count),
                "discard": In(1),
                "clear": In(1),
                "error": Out(BusError).array(count),
                "events": Out(WriteEvents).array(count),
                "counts": Out(StoreEvents),
                "idle": Out(1),
                **({"delta": In(1), "value_format": In(ValueFormat)} if config.delta else {}),
                **({"split": In(1), "rest_address": In(ADDRESS_BITS)} if len(config.masters) > 1 else {}),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The strobe of a group is one bit a lane; each writer spreads it over its bytes."""
        m = Module()
        lanes, count = self.config.lanes, len(OUTPUTS)
        m.submodules.commands = commands = Fork(StoreCommand, count)
        m.submodules.groups = groups = Fork(output_group(lanes, delta=self.config.delta), count)
        wiring.connect(m, wiring.flipped(self.i_command), commands.i)
        wiring.connect(m, wiring.flipped(self.i), groups.i)

        tail = Signal(range(lanes + 1))
        filled = Signal(lanes)
        m.d.comb += tail.eq(self.i_command.payload.params % lanes)
        # A tail of 0 is a full last group, not an empty one.
        whole = Mux(self.i.payload.last & (tail != 0), (1 << tail) - 1, -1)
        # Of the group at `i`: a fork shows it to each output until all of them have it.
        m.d.comb += filled.eq(Mux(self.discard, 0, whole))

        writers = []
        for index, name in enumerate(OUTPUTS):
            write = self._write_state if name in STATES and len(self.config.state_formats) > 1 else self._write
            write = self._write_delta if name == "copy" and self.config.delta else write
            write = self._write_master if name == "p" and len(self.config.masters) > 1 else write
            writer = write(m, index, name, commands.o[index], groups.o[index], filled)
            wiring.connect(m, writer.bus, wiring.flipped(self.bus[index]))
            m.d.comb += [
                writer.clear.eq(self.clear),
                self.error[index].eq(writer.error),
                self.events[index].eq(writer.events),
            ]
            writers.append(writer)
        idle = [writer.idle for writer in writers]
        if self.config.delta:
            idle.append(m.submodules.pack_delta.idle)
        m.d.comb += self.idle.eq(Cat(idle).all())

        taken, copied = self.i.valid & self.i.ready, self.i_command.payload.copy
        if len(self.config.masters) > 1:
            copied = copied | self.split
        for event, flags in {
            "params": filled,
            "nonfinite_gradients": filled & Cat(lane.nonfinite_gradient for lane in self.i.payload.lanes),
            "copy_overflows": filled
            & Cat(lane.copy_overflow for lane in self.i.payload.lanes)
            & copied.replicate(lanes),
        }.items():
            m.d.comb += self.counts[event].eq(Mux(taken, sum(flags[lane] for lane in range(lanes)), 0))
        return m

    def _write(self, m: Module, index: int, name: str, command: Any, group: Any, filled: Signal) -> BurstWriter:
        """Gearbox and writer of one output; they see neither command nor groups where it is not wanted."""
        config = self.config
        number = FP16 if name == "copy" else FP32
        group_bits = number.bits * config.lanes
        wanted = self.i_command.payload.copy if name == "copy" else ~self.absent[index]
        widen = m.submodules[f"widen_{name}"] = Widen(
            group_bits, config.port_bits // group_bits, strb_bits=config.lanes
        )
        writer = m.submodules[f"write_{name}"] = BurstWriter(
            config.port_bits, max_outstanding=config.outstanding_bursts, max_burst_bytes=config.burst_bytes
        )
        m.d.comb += [
            writer.i_command.valid.eq(command.valid & wanted),
            writer.i_command.payload.address.eq(command.payload.address[index]),
            writer.i_command.payload.beats.eq(pieces(command.payload.params, config.port_bytes // number.bytes)),
            command.ready.eq(writer.i_command.ready | ~wanted),
            widen.i.valid.eq(group.valid & wanted),
            widen.i.payload.data.eq(Cat(lane[name] for lane in group.payload.lanes)),
            widen.i.payload.strb.eq(filled),
            widen.i.payload.last.eq(group.payload.last),
            # An output that is not wanted takes its copy of each group at once: a fork waits for the last one.
            group.ready.eq(widen.i.ready | ~wanted),
            writer.i.valid.eq(widen.o.valid),
            writer.i.payload.data.eq(widen.o.payload.data),
            writer.i.payload.strb.eq(Cat(bit.replicate(number.bytes) for bit in widen.o.payload.strb)),
            widen.o.ready.eq(writer.i.ready),
        ]
        return writer

    def _write_delta(self, m: Module, index: int, name: str, command: Any, group: Any, filled: Signal) -> BurstWriter:
        """Writer of the copy, which takes what a packer gives where the command is for what changes."""
        writer = self._write(m, index, name, command, group, filled)
        m.submodules.pack_delta = packer = DeltaPacker(self.config.lanes)
        given, wanted = self.i_command.payload, Signal()
        beats = list(self._delta_beats(m, packer, writer, given.address[index]))
        m.d.comb += [
            wanted.eq(given.copy & self.delta),
            packer.i_command.payload.params.eq(given.params),
            packer.i_command.payload.value_format.eq(self.value_format),
            packer.i.payload.old.eq(group.payload.old),
            packer.i.payload.last.eq(group.payload.last),
        ]
        for lane, new in enumerate(packer.i.payload.new):
            m.d.comb += new.eq(group.payload.lanes[lane].copy)
        with m.If(wanted):  # over what the copy's writer has
            m.d.comb += [
                packer.i_command.valid.eq(command.valid),
                command.ready.eq(packer.i_command.ready),
                packer.i.valid.eq(group.valid),
                group.ready.eq(packer.i.ready),
                m.submodules.widen_copy.i.valid.eq(0),
                *(signal.eq(value) for signal, value in beats),
            ]
        return writer

    def _delta_beats(
        self, m: Module, packer: DeltaPacker, writer: BurstWriter, address: Any
    ) -> Iterator[tuple[Any, Any]]:
        """Give pairs of a signal and its driver, from a packer to its writer: of 64 bits, words are beats."""
        ratio, parts, words = self.config.port_bytes // WORD_BYTES, packer.o_command, packer.o
        strobes = C(1)
        if ratio > 1:
            m.submodules.delta_beats = widen = DeltaBeats(ratio)
            wiring.connect(m, packer.o_command, widen.i_command)
            wiring.connect(m, packer.o, widen.i)
            m.submodules.delta_parts = buffer = HalfBuffer(BeatsCommand)  # from its adders to that of the address
            wiring.connect(m, widen.o_command, buffer.i)
            parts, words, strobes = buffer.o, widen.o, widen.o.payload.strb
        first, count = (parts.payload[name] for name in ("first", "words" if ratio == 1 else "beats"))
        yield writer.i_command.valid, parts.valid
        yield writer.i_command.payload.address, address + (first << (self.config.port_bytes.bit_length() - 1))
        yield writer.i_command.payload.beats, count
        yield parts.ready, writer.i_command.ready
        yield writer.i.valid, words.valid
        yield writer.i.payload.data, words.payload if ratio == 1 else words.payload.data
        yield writer.i.payload.strb, Cat((bit & ~self.discard).replicate(WORD_BYTES) for bit in strobes)
        yield words.ready, writer.i.ready

    def _write_state(self, m: Module, index: int, name: str, command: Any, group: Any, filled: Signal) -> StateWriter:
        """Writer of m or v; it sees neither command nor groups where the array is absent."""
        writer = m.submodules[f"write_{name}"] = StateWriter(self.config, name)
        wanted, state = ~self.absent[index], writer.i_command.payload.state
        m.d.comb += [
            state.address.eq(command.payload.address[index]),
            state.scale_address.eq(command.payload.scale_address[STATES.index(name)]),
            state.params.eq(command.payload.params),
            state.form.eq(command.payload.form),
            writer.i_command.payload.dither.eq(command.payload.dither),
            writer.i_command.valid.eq(command.valid & wanted),
            command.ready.eq(writer.i_command.ready | ~wanted),
            writer.i.valid.eq(group.valid & wanted),
            writer.i.payload.data.eq(Cat(lane[name] for lane in group.payload.lanes)),
            writer.i.payload.strb.eq(filled),
            writer.i.payload.last.eq(group.payload.last),
            group.ready.eq(writer.i.ready | ~wanted),
        ]
        return writer

    def _write_master(self, m: Module, index: int, name: str, command: Any, group: Any, filled: Signal) -> MasterWriter:
        """Writer of p, whole or in halves."""
        writer = m.submodules.write_p = MasterWriter(self.config)
        lanes, given = group.payload.lanes, writer.i_command.payload
        m.d.comb += [
            given.address.eq(command.payload.address[index]),
            given.rest_address.eq(self.rest_address),
            given.params.eq(command.payload.params),
            given.split.eq(self.split),
            writer.i_command.valid.eq(command.valid),
            command.ready.eq(writer.i_command.ready),
            writer.i.valid.eq(group.valid),
            writer.i.payload.p.eq(Cat(lane[name] for lane in lanes)),
            writer.i.payload.weights.eq(Cat(lane.copy for lane in lanes)),
            writer.i.payload.strb.eq(filled),
            writer.i.payload.last.eq(group.payload.last),
            group.ready.eq(writer.i.ready),
        ]
        return writer
