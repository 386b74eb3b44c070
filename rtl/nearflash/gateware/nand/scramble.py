"""Scrambler of raw codewords, 64 bits a cycle; the same unit scrambles and descrambles.

The register is a power of x modulo a polynomial of degree 20; 64 bits of the sequence are 64 linear functions of it,
and so is the register of the next beat.

Contract: beats leave in order with the sequence added to their data, everything else as it came. The sequence starts
anew with each `first` beat from the codeword's row, LUN and place.

Timing: latency LATENCY; one beat a cycle; back-pressure: yes (combinational, from `o` to `i`).
Numerics: equals nearflash.model.nand.scramble to the bit.
"""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import SCRAMBLE_POLYNOMIAL, SCRAMBLE_SKIP
from nearflash.gateware.coding import linear
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.nand.link import RawBeat

__all__ = ["Scrambler"]

_BITS = SCRAMBLE_POLYNOMIAL.bit_length() - 1
_ONE_STEP = [*(2 << k for k in range(_BITS - 1)), SCRAMBLE_POLYNOMIAL ^ 1 << _BITS]


def _sequence() -> list[int]:
    """Columns of the map from the register to the 64 bits of its beat."""
    steps = [linear.power(_ONE_STEP, SCRAMBLE_SKIP + bit) for bit in range(64)]
    return [sum((step[k] & 1) << bit for bit, step in enumerate(steps)) for k in range(_BITS)]


class Scrambler(wiring.Component):
    """Adds the scrambling sequence to raw codewords.

    Members
    -------
    i : In stream of RawBeat.
    o : Out stream of RawBeat.
    """

    #: Cycles from `i` to `o`.
    LATENCY = 1

    i: In(stream.Signature(RawBeat))
    o: Out(stream.Signature(RawBeat))

    def elaborate(self, platform: object) -> Module:
        """One register behind the sum; the state moves on with each beat."""
        m = Module()
        beat = self.i.payload
        folded = Cat(beat.place, beat.row[:14]) ^ beat.row[14:] ^ Cat(Const(0, 11), beat.lun)
        ahead = Signal(_BITS, reset_less=True)
        state = wire(m, Mux(beat.first, Cat(folded[: _BITS - 1], Const(1, 1)), ahead))
        result = Signal(RawBeat, reset_less=True)
        m.d.comb += [self.i.ready.eq(self.o.ready | ~self.o.valid), self.o.payload.eq(result)]
        with m.If(self.i.ready):
            m.d.sync += self.o.valid.eq(self.i.valid)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                result.eq(beat),
                result.data.eq(beat.data ^ linear.apply(m, _sequence(), state, 64)),
                ahead.eq(linear.apply(m, linear.power(_ONE_STEP, 64), state, _BITS)),
            ]
        return m
