"""The unpacked form in which the floating point units hand values to each other, and its two ends.

    fp32 bits -> Unpack -> RAW -> Add, Mul, MulAdd, Div, Sqrt ... -> RAW -> Pack -> fp32 bits

A datapath unpacks once at its entry and packs once at its exit. Between units values are rounded to fp32 (also at the
subnormal position), so that packing is exact.
"""

from collections.abc import Mapping
from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32, NumberFormat
from nearflash.gateware.fp.pipeline import digit_places, normalize_digit, output, register, shift_right

__all__ = ["EXP_ZERO", "FLAGS", "RAW", "Pack", "RawLayout", "Unpack", "widen"]

#: Exponent that goes with `zero`: below that of every product of two fp32 values.
EXP_ZERO = -512
SIG_BITS = FP32.mantissa_bits + 1


class RawLayout(data.StructLayout):
    """A number as (-1)**sign * sig / 2**(sig_bits - 1) * 2**exp.

    Members: sig (its top bit is one unless `zero`), exp (10 bits, signed), sign, zero, inf, nan (at most one of these
    three). A zero has sig 0 and exp EXP_ZERO, so that it aligns as the smallest operand of a sum; sig and exp of inf
    and nan mean nothing, nor does the sign of nan.

    Raises ValueError for fewer than 2 significand bits.
    """

    def __init__(self, sig_bits: int) -> None:
        if sig_bits < 2:
            raise ValueError(f"sig_bits must be at least 2, not {sig_bits!r}")
        self.sig_bits = sig_bits
        super().__init__({"sig": sig_bits, "exp": signed(10), "sign": 1, "zero": 1, "inf": 1, "nan": 1})

    def const(self, init: Any) -> Any:
        """A constant, by field name; a zero gets its exponent by itself."""
        if isinstance(init, Mapping) and init.get("zero"):
            init = {"exp": EXP_ZERO, **init}
        return super().const(init)


#: An fp32 value, unpacked.
RAW = RawLayout(SIG_BITS)
#: IEEE 754 exceptions of one operation; as an integer, Berkeley SoftFloat's encoding.
FLAGS = data.StructLayout({"inexact": 1, "underflow": 1, "overflow": 1, "div_by_zero": 1, "invalid": 1})


def widen(number: Any, layout: RawLayout) -> data.View:
    """The same value in a layout with as many significand bits, or more."""
    sig = Cat(C(0, layout.sig_bits - number.shape().sig_bits), number.sig)
    return data.View(layout, Cat(sig, number.exp, number.sign, number.zero, number.inf, number.nan))


class Unpack(wiring.Component):
    """Bit pattern -> RAW; subnormals are normalised. Exact.

    Timing: latency LATENCY cycles, one result a cycle, free-running.

    Parameters: number, the format: fp32, or one with fewer bits.
    Members: i (bit pattern), o (RAW), signaling (the value is a signaling NaN, which RAW does not tell from a quiet
    one).
    """

    LATENCY = 2

    def __init__(self, number: NumberFormat = FP32) -> None:
        self._number = number
        super().__init__({"i": In(number.bits), "o": Out(RAW), "signaling": Out(1)})

    def elaborate(self, platform: Any) -> Module:
        """Build the unpacker."""
        m = Module()
        bits, bias = self._number.mantissa_bits, self._number.bias
        first, *others = digit_places(bits.bit_length())
        # Cycle 0: classify; first digit of the leading zeros.
        fraction, biased, sign = self.i[:bits], self.i[bits:-1], self.i[-1]
        hidden, special, empty = biased.any(), biased.all(), ~fraction.any()
        shifted, digit = normalize_digit(m, Cat(fraction, hidden), first)
        sig, digits = register(m, shifted), [register(m, digit)]
        exp = register(m, Cat(biased[0] | ~hidden, biased[1:]) - bias)
        sign, quiet = register(m, sign), register(m, fraction[-1])
        zero, inf, nan = register(m, ~biased.any() & empty), register(m, special & empty), register(m, special & ~empty)
        # Cycle 1: the other digits; they are zero but for a subnormal.
        for place in others:
            sig, digit = normalize_digit(m, sig, place)
            digits.insert(0, digit)
        o = output(m, self.o)
        m.d.sync += [
            o.sig.eq(Cat(C(0, SIG_BITS - 1 - bits), sig)),
            o.exp.eq(exp - Cat(*digits)),
            Cat(o.sign, o.zero, o.inf, o.nan).eq(Cat(sign, zero, inf, nan)),
        ]
        with m.If(zero):
            m.d.sync += o.exp.eq(EXP_ZERO)
        m.d.comb += self.signaling.eq(register(m, nan & ~quiet))
        return m


class Pack(wiring.Component):
    """RAW -> bit pattern; a NaN becomes the canonical one. Exact.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Limits: a finite input must be a value of the format, as the rounder leaves it.

    Parameters: number, the format: fp32, or one with fewer bits.
    Members: i (RAW), o (bit pattern).
    """

    LATENCY = 2

    def __init__(self, number: NumberFormat = FP32) -> None:
        self._number = number
        super().__init__({"i": In(RAW), "o": Out(number.bits)})

    def elaborate(self, platform: Any) -> Module:
        """Build the packer."""
        m = Module()
        i, bits, least = self.i, self._number.mantissa_bits, 1 - self._number.bias
        # Cycle 0: how far a subnormal moves right, modulo more than the format has bits.
        subnormal, special = i.exp < least, i.inf | i.nan
        distance = register(m, Mux(subnormal, (least - i.exp)[: bits.bit_length()], 0))
        sig, sign, nan = register(m, i.sig[-1 - bits :]), register(m, i.sign & ~i.nan), register(m, i.nan)
        biased = Mux(subnormal | i.zero, 0, i.exp + self._number.bias)[: self._number.exponent_bits]
        biased = register(m, biased | special.replicate(len(biased)))
        empty = register(m, special | i.zero)
        # Cycle 1: shift.
        shifted, _ = shift_right(m, sig, distance)
        o = output(m, self.o)
        m.d.sync += o.eq(Cat(shifted[:bits], biased, sign))
        with m.If(empty):
            m.d.sync += o[:bits].eq(nan << (bits - 1))
        return m
