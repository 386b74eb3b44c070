"""Writes a head's output, and then its completion.

    i ─► four to a beat ─┬─► BurstWriter ─► bus
    i_completion ────────┘        ▲
    i_output ─────────────────────┘

Contract: outputs that come with `keep` wait in the writer's queue until `i_output` tells where they go; a head's must
be there before, or be none. A completion goes out when it is taken. `idle` rises when all of it was answered.

Timing: an output a cycle; no back-pressure on i: the queue holds the output of the largest head, and one head's only.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.descriptor import COMPLETION_BYTES
from nearflash.abi.formats import FP16
from nearflash.gateware.bus.axi import ADDRESS_BITS, Axi4WriteSignature
from nearflash.gateware.bus.transfer import BusError, TransferCommand
from nearflash.gateware.bus.write import BurstWriter, WriteEvents

__all__ = ["CompletionRecord", "HeadStore"]

_BEAT_BITS = 64
_OUTPUT_BEATS_MAX = 8 * 256 * FP16.bits // _BEAT_BITS


class CompletionRecord(data.Struct):
    """A completion as it lies in memory (nearflash.abi.attention.descriptor.HeadCompletion)."""

    faults: 32
    selected: 32
    entries: 32
    pages: 32
    maximum: data.ArrayLayout(16, 8)


class HeadStore(wiring.Component):
    """Output and completion of one head at a time.

    Members
    -------
    i : In, fp16. i_valid : In. keep : In, goes with i_valid: the output is wanted.
    i_output : In stream of TransferCommand: where the kept outputs go, four a beat.
    i_completion : In stream of {address, record (CompletionRecord)}.
    bus : Out Axi4WriteSignature, 64 bits.
    clear : In, forgets `error`. error : Out BusError. events : Out WriteEvents. idle : Out.
    """

    i: In(FP16.bits)
    i_valid: In(1)
    keep: In(1)
    i_output: In(stream.Signature(TransferCommand))
    i_completion: In(stream.Signature(data.StructLayout({"address": ADDRESS_BITS, "record": CompletionRecord})))
    bus: Out(Axi4WriteSignature(_BEAT_BITS))
    clear: In(1)
    error: Out(BusError)
    events: Out(WriteEvents)
    idle: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Outputs go straight into the queue, a completion word by word, with its command beside the first one."""
        m = Module()
        m.submodules.writer = writer = BurstWriter(_BEAT_BITS, max_burst_bytes=2048, queue_beats=_OUTPUT_BEATS_MAX + 1)
        beats = COMPLETION_BYTES * 8 // _BEAT_BITS
        held, place, word = Signal(_BEAT_BITS - FP16.bits), Signal(2), Signal(range(beats))
        completion, command, record = self.i_completion, writer.i_command, self.i_completion.payload.record
        wiring.connect(m, writer.bus, wiring.flipped(self.bus))
        m.d.comb += [
            writer.clear.eq(self.clear),
            self.error.eq(writer.error),
            self.events.eq(writer.events),
            self.idle.eq(writer.idle & ~completion.valid & ~self.i_output.valid),
            writer.i.payload.strb.eq(-1),
        ]
        with m.If(self.i_valid):
            m.d.sync += [held.eq(Cat(held, self.i)[FP16.bits :]), place.eq(place + 1)]
        # The writer is the completion's as long as there is one. No output may come then: `i` cannot wait.
        with m.If(completion.valid):
            first, last = word == 0, word == beats - 1
            m.d.comb += [
                command.payload.address.eq(completion.payload.address),
                command.payload.beats.eq(beats),
                # Command and first beat go together or not at all: `first` would offer either of them a second time.
                command.valid.eq(first & writer.i.ready),
                writer.i.payload.data.eq(record.as_value().word_select(word, _BEAT_BITS)),
                writer.i.valid.eq(~first | command.ready),
                completion.ready.eq(last & writer.i.ready),
            ]
            with m.If(writer.i.valid & writer.i.ready):
                m.d.sync += word.eq(Mux(last, 0, word + 1))
        with m.Else():
            m.d.comb += [
                command.payload.eq(self.i_output.payload),
                command.valid.eq(self.i_output.valid),
                self.i_output.ready.eq(command.ready),
                writer.i.payload.data.eq(Cat(held, self.i)),
                writer.i.valid.eq(self.i_valid & self.keep & (place == 3)),
            ]
        return m
