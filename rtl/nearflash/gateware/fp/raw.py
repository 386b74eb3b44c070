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

from nearflash.abi.formats import FP32
from nearflash.gateware.fp.pipeline import digit_places, normalize_digit, register, shift_right

__all__ = ["EXP_ZERO", "FLAGS", "RAW", "Pack", "RawLayout", "Unpack", "widened"]

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


def widened(number: Any, layout: RawLayout) -> data.View:
    """The same value in a layout with as many significand bits, or more."""
    sig = Cat(C(0, layout.sig_bits - number.shape().sig_bits), number.sig)
    return data.View(layout, Cat(sig, number.exp, number.sign, number.zero, number.inf, number.nan))


class Unpack(wiring.Component):
    """fp32 bit pattern -> RAW; subnormals are normalised. Exact.

    Timing: latency LATENCY cycles, one result a cycle, free-running.

    Members: i (fp32 bits), o (RAW), signaling (the value is a signaling NaN, which RAW does not tell from a quiet one).
    """

    LATENCY = 2

    i: In(FP32.bits)
    o: Out(RAW)
    signaling: Out(1)

    def elaborate(self, platform: Any) -> Module:
        """Build the unpacker."""
        m = Module()
        coarse, middle, fine = digit_places(5)
        # Cycle 0: classify; first digit of the leading zeros.
        fraction, biased, sign = self.i[: SIG_BITS - 1], self.i[SIG_BITS - 1 : -1], self.i[-1]
        hidden, special, empty = biased.any(), biased.all(), ~fraction.any()
        shifted, digit = normalize_digit(Cat(fraction, hidden), coarse)
        sig_1, digit_1 = register(m, shifted), register(m, digit)
        exp_1 = register(m, (biased - FP32.bias).as_signed())
        hidden_1, sign_1 = register(m, hidden), register(m, sign)
        zero_1, inf_1, nan_1 = register(m, ~hidden & empty), register(m, special & empty), register(m, special & ~empty)
        quiet_1 = register(m, fraction[-1])
        # Cycle 1: the other digits; a subnormal's exponent follows from them alone.
        shifted, middle_digit = normalize_digit(sig_1, middle)
        shifted, fine_digit = normalize_digit(shifted, fine)
        zeros = Cat(fine_digit, middle_digit, digit_1)
        m.d.sync += [
            self.o.sig.eq(shifted),
            self.o.exp.eq(Mux(hidden_1, exp_1, (1 - FP32.bias) - zeros)),
            self.o.sign.eq(sign_1),
            Cat(self.o.zero, self.o.inf, self.o.nan).eq(Cat(zero_1, inf_1, nan_1)),
            self.signaling.eq(nan_1 & ~quiet_1),
        ]
        with m.If(zero_1):
            m.d.sync += self.o.exp.eq(EXP_ZERO)
        return m


class Pack(wiring.Component):
    """RAW -> fp32 bit pattern; a NaN becomes the canonical one. Exact.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Limits: a finite input must be an fp32 value, as the units leave it.

    Members: i (RAW), o (fp32 bits).
    """

    LATENCY = 2

    i: In(RAW)
    o: Out(FP32.bits)

    def elaborate(self, platform: Any) -> Module:
        """Build the packer."""
        m = Module()
        # Cycle 0: how far a subnormal moves right; exponents from -157 up are told apart by their low five bits.
        subnormal = self.i.exp < 1 - FP32.bias
        distance = ((1 - FP32.bias) - self.i.exp)[:5]
        special = self.i.inf | self.i.nan
        distance_1 = register(m, Mux(subnormal, distance, 0))
        sig_1 = register(m, self.i.sig)
        biased_1 = register(m, Mux(special, C(255, 8), Mux(subnormal | self.i.zero, 0, (self.i.exp + FP32.bias)[:8])))
        sign_1 = register(m, self.i.sign & ~self.i.nan)
        empty_1, nan_1 = register(m, special | self.i.zero), register(m, self.i.nan)
        # Cycle 1: shift.
        shifted, _ = shift_right(sig_1, distance_1)
        m.d.sync += self.o.eq(Cat(shifted[: SIG_BITS - 1], biased_1, sign_1))
        with m.If(empty_1):
            m.d.sync += self.o[: SIG_BITS - 1].eq(nan_1 << (SIG_BITS - 2))
        return m
