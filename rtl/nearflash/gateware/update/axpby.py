"""AXPBY: a·x + b·y on fp32, the operation that optimizers are made of.

    fused = 0:  o = rn(rn(a·x) + rn(b·y))
    fused = 1:  o = rn(rn(a·x) + b·y)            (a fused multiply-add on top of a rounded product)

Timing: latency LATENCY cycles from a and x; b, y and fused come ARRIVAL cycles after a and x, when the first product
is there; one result a cycle; free-running, no back-pressure.
Numerics: fp32 in and out, subnormals kept, RNE at each rn; equals nearflash.model.fp (mul, then muladd) to the bit.
Source: Smart-Infinity (HPCA'24), section V, for the unit; the fused bit serves the named operation orders.
"""

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.mul import Mul
from nearflash.gateware.fp.muladd import MulAdd
from nearflash.gateware.fp.raw import RAW

__all__ = ["Axpby"]


class Axpby(wiring.Component):
    """Two products and their sum.

    Members
    -------
    a, x, b, y : In, RAW operands.
    fused : In, 1: the second product is not rounded.
    o : Out, RAW result.
    """

    a: In(RAW)
    x: In(RAW)
    b: In(RAW)
    y: In(RAW)
    fused: In(1)
    o: Out(RAW)

    def __init__(self) -> None:
        self._product, self._sum = Mul(), MulAdd()
        #: Cycles from a and x to `o`.
        self.LATENCY = self._product.LATENCY + self._sum.LATENCY
        #: Cycles by which an operand comes after a and x.
        self.ARRIVAL = dict.fromkeys(("b", "y", "fused"), self._product.LATENCY)
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        """The product a·x first, then all at once."""
        m = Module()
        m.submodules.product = product = self._product
        m.submodules.sum = total = self._sum
        m.d.comb += [
            product.a.eq(self.a),
            product.b.eq(self.x),
            total.a.eq(self.b),
            total.b.eq(self.y),
            total.c.eq(product.o),
            total.fused.eq(self.fused),
            self.o.eq(total.o),
        ]
        return m
