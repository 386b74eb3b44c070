"""From an integer to fp16, and the order of fp16 numbers as integers."""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Shape, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP16
from nearflash.gateware.attention.numerics.carry import carry_add
from nearflash.gateware.fp.pipeline import delay, digit_places, normalize_digit, output, register

__all__ = ["ToFp16", "order_key"]

_SIG_BITS = FP16.mantissa_bits + 1
_LEAST = 1 - FP16.bias


def order_key(bits: Value) -> Value:
    """Key of fp16 `bits` that compares as an unsigned integer as the numbers do; -0 counts as +0. Combinational."""
    negative = bits[-1] & bits[:-1].any()
    return Cat(bits[:-1] ^ negative.replicate(len(bits) - 1), ~negative)


class ToFp16(wiring.Component):
    """o = i · 2^lsb, rounded to nearest even.

    Below 2^-14 a one is put where that is, so that subnormals are normalised no further.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: integer -> fp16; infinite past the largest number; 0 gives +0. Equals
    nearflash.model.attention.numerics.fp16.to_fp16.

    Parameters: shape, of the integer: signed or unsigned, at most 64 bits; lsb.
    Members: i, o (fp16 bits).

    Raises ValueError for an integer of fewer than 2 bits, or more than 64.
    """

    def __init__(self, shape: Shape, lsb: int) -> None:
        if not 2 <= shape.width <= 64:
            raise ValueError(f"shape must have 2 to 64 bits, not {shape.width!r}")
        self._signed = shape.signed
        self._pad = max(lsb - _LEAST, 0, _SIG_BITS + 2 - shape.width)  # zeros below
        self._lsb = lsb - self._pad
        self._width = shape.width + self._pad
        self._places = digit_places((self._width - 1).bit_length())
        self.LATENCY = len(self._places) + 2
        super().__init__({"i": In(shape), "o": Out(FP16.bits)})

    def elaborate(self, platform: Any) -> Module:
        """Build the normaliser and the rounder."""
        m = Module()
        # Cycle 0: magnitude.
        negative = self.i[-1] if self._signed else C(0, 1)
        magnitude = (self.i ^ negative.replicate(len(self.i))) + negative
        value = Cat(C(0, self._pad), register(m, magnitude[: len(self.i)]))
        # Cycles 1 …: normalise, a digit a cycle, from the one that stands for a subnormal where there is none above.
        least = min(_LEAST - self._lsb, self._width - 1)
        subnormal = ~value[least:].any()
        value = Cat(value[:least], value[least] | subnormal, value[least + 1 :])
        subnormal = delay(m, subnormal, len(self._places))
        digits: list[Value] = []
        for cycle, place in enumerate(self._places):
            value, digit = normalize_digit(m, value, place)
            value = register(m, value)
            digits.insert(0, delay(m, digit, len(self._places) - cycle))
        # Last cycle: one sum packs and rounds.
        most = self._width - 1 + self._lsb + FP16.bias
        field = most - Cat(digits) - subnormal
        kept, guard = value[-_SIG_BITS:], value[-_SIG_BITS - 1]
        up = guard & (value[: -_SIG_BITS - 1].any() | kept[0])
        packed = carry_add(m, Cat(kept[:-1], field[: max(most.bit_length(), 5)]), C(0, 1), up)
        o, infinity = output(m, self.o), 0x1F << FP16.mantissa_bits
        sign = delay(m, negative, self.LATENCY - 1)
        m.d.sync += o.eq(Cat(Mux(packed >= infinity, infinity, packed[:15])[:15], sign))
        return m
