"""fp32 product."""

from typing import Any

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.product import Product
from nearflash.gateware.fp.raw import FLAGS, RAW
from nearflash.gateware.fp.round import Round, to_unrounded

__all__ = ["Mul"]


class Mul(wiring.Component):
    """o = a * b.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: fp32, rounds once, to nearest even; equals nearflash.model.fp.mul to the bit, exceptions too.

    Members: a, b, o (RAW), flags (FLAGS; `invalid` for 0 * inf).
    """

    a: In(RAW)
    b: In(RAW)
    o: Out(RAW)
    flags: Out(FLAGS)

    def __init__(self) -> None:
        self._product, self._round = Product(), Round()
        self.LATENCY = self._product.LATENCY + self._round.LATENCY
        super().__init__()

    def elaborate(self, platform: Any) -> Module:
        """Build the multiplier."""
        m = Module()
        m.submodules.product = product = self._product
        m.submodules.round = rounder = self._round
        m.d.comb += [
            product.a.eq(self.a),
            product.b.eq(self.b),
            rounder.i.eq(to_unrounded(product.o)),
            rounder.invalid.eq(product.invalid),
            self.o.eq(rounder.o),
            self.flags.eq(rounder.flags),
        ]
        return m
