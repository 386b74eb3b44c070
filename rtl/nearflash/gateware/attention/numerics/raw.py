"""From an exact integer to an unpacked fp32 number."""

from typing import Any

from amaranth.hdl import C, Cat, Module, Shape, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.numerics.carry import carry_add
from nearflash.gateware.fp.pipeline import delay, digit_places, normalize_digit, register
from nearflash.gateware.fp.raw import RAW, SIG_BITS
from nearflash.gateware.fp.round import Round

__all__ = ["ToRaw"]

_KEPT_BITS = SIG_BITS + 1


class ToRaw(wiring.Component):
    """o = i · 2^lsb in fp32.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: integer -> fp32, rounds once, to nearest even; 0 gives +0. Equals
    nearflash.model.attention.numerics.raw.to_fp32.
    Limits: lsb at least -126 and width + lsb at most 127, so that every result is normal.

    Parameters: shape, of the integer: signed or unsigned, 27 bits or more; lsb.
    Members: i, o (RAW).

    Raises ValueError for a shape or an lsb outside these limits.
    """

    def __init__(self, shape: Shape, lsb: int) -> None:
        if shape.width < _KEPT_BITS + 2:
            raise ValueError(f"shape must have at least {_KEPT_BITS + 2} bits, not {shape.width!r}")
        if lsb < -126 or shape.width + lsb > 127:
            raise ValueError(f"lsb must be in -126 to {127 - shape.width}, not {lsb!r}")
        self._shape, self._lsb = shape, lsb
        self._places = digit_places((shape.width - 1).bit_length())
        self._round = Round(subnormals=False)
        self.LATENCY = 2 + len(self._places) + self._round.LATENCY
        super().__init__({"i": In(shape), "o": Out(RAW)})

    def elaborate(self, platform: Any) -> Module:
        """Build the normaliser; the rounder is that of the floating point units."""
        m = Module()
        m.submodules.round = rounder = self._round
        negative = self.i[-1] if self._shape.signed else C(0, 1)
        # Cycles 0, 1: magnitude. Then a digit a cycle; bits that no later shift can reach become one sticky bit.
        digits: list[Value] = []
        value, sticky = self._magnitude(m, negative), C(0, 1)
        for cycle, place in enumerate(self._places):
            value, digit = normalize_digit(m, value, place)
            spare = max(len(value) - _KEPT_BITS - ((1 << place.start) - 1), 0)
            value, sticky = register(m, value[spare:]), register(m, sticky | value[:spare].any())
            digits.insert(0, delay(m, digit, len(self._places) - cycle))
        i = rounder.i
        m.d.comb += [
            i.sig.eq(Cat(sticky, value)),
            i.exp.eq(self._shape.width - 1 + self._lsb - Cat(digits)),
            i.zero.eq(~value[-1]),
            i.sign.eq(delay(m, negative, self.LATENCY - self._round.LATENCY)),
            self.o.eq(rounder.o),
        ]
        return m

    def _magnitude(self, m: Module, negative: Value) -> Value:
        half = self._shape.width // 2
        flipped = self.i.as_unsigned() ^ negative.replicate(len(self.i))
        low, high = register(m, carry_add(m, flipped[:half], C(0, 1), negative)), register(m, flipped[half:])
        return Cat(register(m, low[:half]), register(m, (high + low[half])[: len(high)]))
