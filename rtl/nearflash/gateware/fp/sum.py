"""The sum of two unpacked numbers, aligned, added and normalised, before rounding.

    swap by magnitude -> shift the smaller right (lost bits: one sticky bit) -> add or subtract -> shift left

The larger operand leads, so no difference is negative. Where the operands' exponents differ by two or more a difference
loses at most one leading bit, which leaves the sticky bit below the guard bit; where they differ by less nothing is
lost.
"""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import delay, digit_places, normalize_digit, output, register, shift_right
from nearflash.gateware.fp.raw import RAW, RawLayout

__all__ = ["Sum"]


class Sum(wiring.Component):
    """o = a + b, exact down to the guard bit of fp32; what is lost below leaves a one among the lower bits.

    Timing: latency LATENCY = 6 cycles, one result a cycle, free-running.
    Numerics: an exact zero is +0, unless both operands are -0.

    Parameters: a_bits, significand bits of a (24 or more).
    Members: a (RawLayout(a_bits)), b (RAW), o (RawLayout(max(28, a_bits + 2)); its exponent means nothing where it is
    zero), invalid (inf - inf).
    Raises ValueError for a_bits below 24.
    """

    LATENCY = 6

    def __init__(self, a_bits: int = RAW.sig_bits) -> None:
        if a_bits < RAW.sig_bits:
            raise ValueError(f"a_bits must be at least {RAW.sig_bits}, not {a_bits!r}")
        self._a_bits = a_bits
        self._low_bits = max(1, RAW.sig_bits + 3 - a_bits)  # below the operands' last bits; the lowest is sticky
        layout = RawLayout(a_bits + self._low_bits + 1)
        super().__init__({"a": In(RawLayout(a_bits)), "b": In(RAW), "o": Out(layout), "invalid": Out(1)})

    def elaborate(self, platform: Any) -> Module:
        """Build the adder."""
        m = Module()
        a, b = self.a, self.b
        padding = self._a_bits - RAW.sig_bits
        bits = (len(self.o.sig) - 1).bit_length()
        # Cycle 0: compare, both differences of the exponents.
        keys = [Cat(number.sig[-RAW.sig_bits :], number.exp[:-1], ~number.exp[-1]) for number in (a, b)]
        swap_1 = register(m, keys[1] > keys[0])
        ahead_1, behind_1 = register(m, (a.exp - b.exp)[:10]), register(m, (b.exp - a.exp)[:10])
        a_1, b_1 = register(m, a), register(m, b)
        # Cycle 1: swap; a distance past the window loses all bits to the sticky one.
        b_sig = Cat(C(0, padding), b_1.sig)
        large_2 = register(m, Mux(swap_1, b_sig, a_1.sig))
        small_2 = register(m, Mux(swap_1, a_1.sig, b_sig))
        distance = Mux(swap_1, behind_1, ahead_1)
        distance_2 = register(m, distance[:bits] | distance[bits:].any().replicate(bits))
        exp_2 = register(m, Mux(swap_1, b_1.exp, a_1.exp))
        subtract = a_1.sign ^ b_1.sign
        subtract_3 = delay(m, subtract, 2)
        specials = self._specials(a_1, b_1, swap_1, subtract)
        # Cycle 2: align.
        aligned, sticky = shift_right(m, Cat(C(0, self._low_bits), small_2), distance_2)
        small_3, sticky_3, large_3 = register(m, aligned), register(m, sticky), register(m, large_2)
        exp_5 = delay(m, register(m, exp_2 + 1), 2)
        # Cycle 3: add or subtract, on one carry chain.
        inverted = (small_3 | sticky_3) ^ subtract_3.replicate(len(small_3))
        total = Signal(len(self.o.sig) + 1)
        large_3 = Cat(C(1, 1), C(0, self._low_bits), large_3, C(0, 1))
        m.d.comb += total.eq(large_3 + Cat(subtract_3, inverted, subtract_3))
        sig_4 = register(m, total[1:])
        # Cycles 4 and 5: normalise.
        first, *others = digit_places(bits)
        shifted, digit = normalize_digit(m, sig_4, first)
        sig, digits = register(m, shifted), [register(m, digit)]
        for place in others:
            sig, digit = normalize_digit(m, sig, place)
            digits.insert(0, digit)
        nan, inf, sign, negative_zero, invalid = (delay(m, value, 4) for value in specials)
        zero = ~sig[-1] & ~inf & ~nan
        o = output(m, self.o)
        m.d.comb += self.invalid.eq(register(m, invalid))
        m.d.sync += [
            o.sig.eq(sig),
            o.exp.eq(exp_5 - Cat(*digits)),
            o.sign.eq(Mux(zero, negative_zero, sign)),
            Cat(o.zero, o.inf, o.nan).eq(Cat(zero, inf, nan)),
        ]
        return m

    def _specials(self, a: Any, b: Any, swap: Value, subtract: Value) -> tuple[Value, ...]:
        """nan, inf, sign where not zero, sign where zero, invalid."""
        invalid = a.inf & b.inf & subtract
        nan = a.nan | b.nan | invalid
        inf = (a.inf | b.inf) & ~nan
        sign = Mux(Mux(inf, b.inf, swap), b.sign, a.sign)
        return nan, inf, sign, a.sign & b.sign, invalid
