"""Exact dot product of fp16 operands: four multipliers and the sum."""

from typing import Any

from amaranth.hdl import Cat, Module, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import QK_BITS
from nearflash.gateware.attention.numerics.dot import LANES, ExactDot
from nearflash.gateware.attention.numerics.product import OPERAND, ExactProduct, fp16_operand
from nearflash.gateware.fp.pipeline import delay

__all__ = ["ExactMac"]


class ExactMac(wiring.Component):
    """Four `ExactProduct`s and an `ExactDot`.

    Timing and numerics: as ExactDot, LATENCY counted from the operands.

    Members: a, b (fp16 bits, four each), truncate, valid, first, last, limit_shift, o, o_valid, o_nonfinite, o_exceeds.
    """

    LATENCY = ExactProduct.LATENCY + ExactDot.LATENCY

    a: In(16).array(LANES)
    b: In(16).array(LANES)
    truncate: In(1)
    valid: In(1)
    first: In(1)
    last: In(1)
    limit_shift: In(4)
    o: Out(signed(QK_BITS))
    o_valid: Out(1)
    o_nonfinite: Out(1)
    o_exceeds: Out(1)

    def elaborate(self, platform: Any) -> Module:
        """Build products and sum."""
        m = Module()
        m.submodules.dot = dot = ExactDot()
        nonfinite = []
        for lane in range(LANES):
            m.submodules[f"product_{lane}"] = product = ExactProduct()
            m.d.comb += [product.truncate.eq(self.truncate), dot.products[lane].eq(product.o)]
            for bits, port in ((self.a[lane], product.a), (self.b[lane], product.b)):
                one = fp16_operand(m, bits)
                m.d.comb += [port[name].eq(one[name]) for name, _ in OPERAND]
                nonfinite.append(bits[10:15].all())
        m.d.comb += dot.nonfinite.eq(delay(m, Cat(nonfinite).any(), ExactProduct.LATENCY))
        for name in ("valid", "first", "last", "limit_shift"):
            m.d.comb += getattr(dot, name).eq(delay(m, getattr(self, name), ExactProduct.LATENCY))
        for name in ("o", "o_valid", "o_nonfinite", "o_exceeds"):
            m.d.comb += getattr(self, name).eq(getattr(dot, name))
        return m
