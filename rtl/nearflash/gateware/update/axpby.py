"""AXPBY: a·x + b·y on fp32, the operation that optimizers are made of.

    fused = 0:  o = rn(rn(a·x) + rn(b·y))
    fused = 1:  o = rn(rn(a·x) + b·y)            (a fused multiply-add on top of a rounded product)

Timing: latency LATENCY cycles; one result a cycle; free-running, no back-pressure.
Numerics: fp32 in and out, subnormals kept, RNE at each rn; equals nearflash.model.fp (mul, then muladd) to the bit.
Source: Smart-Infinity (HPCA'24), section V, for the unit; the fused bit serves the named operation orders.
"""

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.datapath import Datapath, Timed
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

    #: Cycles from operands to `o`.
    LATENCY = Mul.LATENCY + MulAdd.LATENCY

    a: In(RAW)
    x: In(RAW)
    b: In(RAW)
    y: In(RAW)
    fused: In(1)
    o: Out(RAW)

    def elaborate(self, platform: object) -> Module:
        """The product a·x first; b and y wait for it."""
        m = Module()
        path = Datapath(m)
        product = path.call("product", Mul(), a=Timed(self.a, 0), b=Timed(self.x, 0))
        total = path.call("sum", MulAdd(), a=Timed(self.b, 0), b=Timed(self.y, 0), c=product, fused=self.fused)
        m.d.comb += self.o.eq(total.value)
        return m
