"""fp32 sum."""

from typing import Any

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.raw import FLAGS, RAW
from nearflash.gateware.fp.round import Round, to_unrounded
from nearflash.gateware.fp.sum import Sum

__all__ = ["Add"]


class Add(wiring.Component):
    """o = a + b; for a difference the caller flips b's sign.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: fp32, rounds once, to nearest even (a subnormal sum is exact); equals nearflash.model.fp.add to the bit,
    exceptions too.

    Members: a, b, o (RAW), flags (FLAGS; `invalid` for inf - inf).
    """

    a: In(RAW)
    b: In(RAW)
    o: Out(RAW)
    flags: Out(FLAGS)

    def __init__(self) -> None:
        self._sum, self._round = Sum(), Round(subnormals=False)
        self.LATENCY = self._sum.LATENCY + self._round.LATENCY
        super().__init__()

    def elaborate(self, platform: Any) -> Module:
        """Build the adder."""
        m = Module()
        m.submodules.sum = total = self._sum
        m.submodules.round = rounder = self._round
        m.d.comb += [
            total.a.eq(self.a),
            total.b.eq(self.b),
            rounder.i.eq(to_unrounded(total.o)),
            rounder.invalid.eq(total.invalid),
            self.o.eq(rounder.o),
            self.flags.eq(rounder.flags),
        ]
        return m
