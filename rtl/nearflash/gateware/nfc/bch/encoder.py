"""Encoder of the BCH code: sealed codewords in, codewords with parity out, not yet scrambled.

    beat, 32 bits late ──► + first 64 bits of the remainder ──► 64 steps of the division by g at once ──► remainder

A message is 65.5 beats. It is divided 32 bits late: the first step sees 32 zeros, which change nothing, ahead of the
message, and the last one ends with the message.

Contract: for each codeword 66 beats in (aux, data, CRC), 69 beats out: the same with the parity behind the CRC and two
zero bytes. Reset drops the codeword inside.

Timing: latency 0 cycles (combinational) for beats 0 to 64; 70 cycles a codeword; back-pressure: yes.
Numerics: equals nearflash.model.nfc.bch.encoder to the bit.
"""

from amaranth import Array, Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.codeword import PARITY_BYTES
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.nfc import linear
from nearflash.gateware.nfc.bch.field import generator
from nearflash.gateware.nfc.codeword import MESSAGE_BEATS
from nearflash.gateware.nfc.link import RAW_BEATS

__all__ = ["EncodedBeat", "Encoder"]

_PARITY_BITS = 8 * PARITY_BYTES


class EncodedBeat(data.Struct):
    """A beat of a codeword with parity."""

    data: 64
    first: 1
    last: 1


def _columns() -> list[int]:
    """Remainders of x^(208 + 63 - b), bit r the coefficient of x^(207 - r): what bit b of a step leaves."""
    g, remainder = generator(), 1 << (_PARITY_BITS - 1)
    columns: list[int] = []
    for _ in range(64):
        remainder = remainder << 1 ^ (remainder >> (_PARITY_BITS - 1)) * g
        columns.insert(0, int(f"{remainder:0{_PARITY_BITS}b}"[::-1], 2))
    return columns


class Encoder(wiring.Component):
    """Appends the parity to messages.

    Members
    -------
    i : In stream of 64 bits, 66 beats a codeword.
    o : Out stream of EncodedBeat, 69 beats a codeword.
    """

    i: In(stream.Signature(64))
    o: Out(stream.Signature(EncodedBeat))

    def elaborate(self, platform: object) -> Module:
        """The last beat of the message is divided first and given, with parity in its upper half, a cycle later."""
        m = Module()
        remainder, late = Signal(_PARITY_BITS), Signal(32)
        beat, divided, divides = Signal(range(RAW_BEATS)), Signal(), Signal()
        in_message, crc_beat = beat < MESSAGE_BEATS - 1, beat == MESSAGE_BEATS - 1
        mixed = wire(m, Cat(late, self.i.payload[:32]) ^ remainder[:64])
        with m.If(divides):
            m.d.sync += remainder.eq(remainder[64:] ^ linear.apply(m, _columns(), mixed, _PARITY_BITS))
            m.d.sync += late.eq(self.i.payload[32:])

        tail = [
            Cat(self.i.payload[:32], remainder[:32]), remainder[32:96], remainder[96:160],
            Cat(remainder[160:], Const(0, 16)),
        ]  # fmt: skip
        moves = self.o.valid & self.o.ready
        m.d.comb += [
            self.o.payload.data.eq(Mux(in_message, self.i.payload, Array(tail)[(beat - (MESSAGE_BEATS - 1))[:2]])),
            self.o.payload.first.eq(beat == 0),
            self.o.payload.last.eq(beat == RAW_BEATS - 1),
            self.o.valid.eq(Mux(in_message, self.i.valid, divided)),
            self.i.ready.eq(self.o.ready & (in_message | (crc_beat & divided))),
            divides.eq(Mux(in_message, moves, crc_beat & self.i.valid & ~divided)),
        ]
        with m.If(divides & crc_beat):
            m.d.sync += divided.eq(1)
        with m.If(moves):
            m.d.sync += beat.eq(beat + 1)
            with m.If(self.o.payload.last):
                m.d.sync += [beat.eq(0), divided.eq(0), remainder.eq(0), late.eq(0)]
        return m
