"""Encoder of the BCH code: sealed codewords in, codewords with parity out, not yet scrambled.

    half a beat ──► + first 32 bits of the remainder ──► 32 steps of the division by g at once ──► remainder

A message is 131 halves of a beat. Behind it the remainder is shifted out, by the same steps without anything added.

Contract: for each codeword 66 beats in (aux, data, CRC), 69 beats out: the same with the parity behind the CRC and two
zero bytes. Reset drops the codeword inside.

Timing: a beat leaves in the second cycle in which it is there; 138 cycles a codeword; back-pressure: yes.
Numerics: equals nearflash.model.nand.bch.encoder to the bit.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import PARITY_BYTES
from nearflash.gateware.coding import linear
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.nand.bch.field import generator
from nearflash.gateware.nand.codeword import MESSAGE_BEATS
from nearflash.gateware.nand.link import RAW_BEATS

__all__ = ["EncodedBeat", "Encoder"]

_PARITY_BITS = 8 * PARITY_BYTES
_STEPS = 32


class EncodedBeat(data.Struct):
    """A beat of a codeword with parity."""

    data: 64
    first: 1
    last: 1


def _columns() -> list[int]:
    """Remainders of x^(208 + 31 - b), bit r the coefficient of x^(207 - r): what bit b of a step leaves."""
    g, remainder = generator(), 1 << (_PARITY_BITS - 1)
    columns: list[int] = []
    for _ in range(_STEPS):
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
        """Low half, then high half of a beat; a beat leaves with its high half."""
        m = Module()
        remainder, low = Signal(_PARITY_BITS), Signal(_STEPS, reset_less=True)
        beat, high, steps = Signal(range(RAW_BEATS)), Signal(), Signal()
        crc_beat, in_parity = beat == MESSAGE_BEATS - 1, beat >= MESSAGE_BEATS
        there = self.i.valid | in_parity
        half = Mux(high, self.i.payload[_STEPS:], self.i.payload[:_STEPS])
        # Shifting in zeros: the remainder leaves as parity, and nothing is added to it.
        mixed = wire(m, Mux(in_parity | (high & crc_beat), 0, half ^ remainder[:_STEPS]))
        with m.If(steps):
            m.d.sync += remainder.eq(remainder[_STEPS:] ^ linear.apply(m, _columns(), mixed, _PARITY_BITS))
            m.d.sync += [low.eq(remainder), high.eq(~high)]

        moves = self.o.valid & self.o.ready
        first_half = Mux(in_parity, low, self.i.payload[:_STEPS])
        second_half = Mux(in_parity | crc_beat, remainder[:_STEPS], self.i.payload[_STEPS:])
        m.d.comb += [
            self.o.payload.data.eq(Cat(first_half, second_half)),
            self.o.payload.first.eq(beat == 0),
            self.o.payload.last.eq(beat == RAW_BEATS - 1),
            self.o.valid.eq(high & there),
            # Two cycles a beat: it stays at `i` until its high half is through.
            self.i.ready.eq(high & self.o.ready & ~in_parity),
            steps.eq(Mux(high, moves, there)),
        ]
        with m.If(moves):
            m.d.sync += beat.eq(Mux(self.o.payload.last, 0, beat + 1))
        return m
