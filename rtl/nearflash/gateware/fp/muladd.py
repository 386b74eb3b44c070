"""fp32 multiply-add with the product rounded or not, chosen at run time."""

from typing import Any

from amaranth.hdl import Cat, Module
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import delay, register
from nearflash.gateware.fp.product import Product
from nearflash.gateware.fp.raw import FLAGS, RAW, RawLayout
from nearflash.gateware.fp.round import Round, to_unrounded
from nearflash.gateware.fp.sum import Sum

__all__ = ["MulAdd"]

_PRODUCT = RawLayout(2 * RAW.sig_bits)


class MulAdd(wiring.Component):
    """o = fma(a, b, c) where `fused`, else rn(rn(a * b) + c), with rn the rounding to fp32.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: fp32, rounds to nearest even, once or twice; equals nearflash.model.fp.muladd to the bit. Exceptions are
    those of all operations together. c = -0 leaves rn(a * b) alone.

    Division by an invariant: let multiplicand_bits be 51 and b = 1/s cut to 51 bits; unfused, a * b rounds to rn(a / s)
    where that is normal. With significands as integers, a quotient in [1, 2) is a 2**23 / s and a rounding boundary
    is M / 2**24 with M odd; they differ (s * M has 25 significant bits or more), so by at least 1 / (s 2**24) > 2**-48;
    in [1/2, 1) by 2**-49. That is more than 2**-49 of the quotient, and a * b falls short by less than 2**-50 of it.
    (A subnormal quotient can be a tie, which this would round down; `inexact` is that of a * b.)

    Parameters: multiplicand_bits, significand bits of b, 24 or more.
    Members: a, c (RAW), b (RawLayout(multiplicand_bits); fused, its bits past the 24th must be zero), fused (goes with
    its operands), o (RAW), flags (FLAGS; `invalid` for 0 * inf and inf - inf).
    Raises ValueError for fewer than 24 bits.
    """

    def __init__(self, multiplicand_bits: int = RAW.sig_bits) -> None:
        if multiplicand_bits < RAW.sig_bits:
            raise ValueError(f"multiplicand_bits must be at least {RAW.sig_bits}, not {multiplicand_bits!r}")
        self._product, self._inner = Product(multiplicand_bits), Round()
        self._sum, self._outer = Sum(_PRODUCT.sig_bits), Round()
        self.LATENCY = sum(part.LATENCY for part in (self._product, self._inner, self._sum, self._outer))
        operand = In(RawLayout(multiplicand_bits))
        super().__init__({"a": In(RAW), "b": operand, "c": In(RAW), "fused": In(1), "o": Out(RAW), "flags": Out(FLAGS)})

    def elaborate(self, platform: Any) -> Module:
        """Build the unit."""
        m = Module()
        m.submodules.product = product = self._product
        m.submodules.inner = inner = self._inner
        m.submodules.sum = total = self._sum
        m.submodules.outer = outer = self._outer
        fused = delay(m, self.fused, product.LATENCY)
        addend = delay(m, self.c, product.LATENCY + inner.LATENCY)
        # The rounder passes the upper half of an unrounded product; the lower half goes beside it.
        low = product.o.sig[-_PRODUCT.sig_bits : -RAW.sig_bits]
        low = delay(m, register(m, low & fused.replicate(len(low))), inner.LATENCY - 1)
        inner_flags = delay(m, inner.flags, total.LATENCY + outer.LATENCY)
        number = inner.o
        fields = Cat(low, number.sig, number.exp, number.sign, number.zero, number.inf, number.nan)
        m.d.comb += [
            product.a.eq(self.a),
            product.b.eq(self.b),
            inner.i.eq(to_unrounded(product.o)),
            inner.keep.eq(fused),
            inner.invalid.eq(product.invalid),
            total.a.eq(data.View(_PRODUCT, fields)),
            total.b.eq(addend),
            outer.i.eq(to_unrounded(total.o)),
            outer.invalid.eq(total.invalid),
            self.o.eq(outer.o),
            self.flags.eq(outer.flags.as_value() | inner_flags.as_value()),
        ]
        return m
