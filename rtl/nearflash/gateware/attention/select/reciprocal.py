"""Reciprocal: R = floor((2^(15 + b) - 1) / total), b the bits of the total, one bit a cycle.

The dividend is all ones. The first one of the quotient comes with bit b, and R has 16 bits.

Timing: b + 16 cycles from `start` to `done`. Numerics: exact; equals
nearflash.model.attention.select.selection.probabilities.
"""

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import wire

__all__ = ["RECIPROCAL_BITS", "Reciprocal"]

RECIPROCAL_BITS = 16


class Reciprocal(wiring.Component):
    """Divides by numbers of up to `bits` bits, not zero.

    Members
    -------
    total : In, constant from `start` to `done`. start : In.
    done : Out, in one cycle: o and length are there, and stay until the next start.
    o : Out, R. length : Out, b.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        super().__init__(
            {
                "total": In(bits),
                "start": In(1),
                "done": Out(1),
                "o": Out(RECIPROCAL_BITS),
                "length": Out(range(bits + 1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Restoring division; it ends when the quotient's first one is in its topmost bit."""
        m = Module()
        busy, rest = Signal(), Signal(self._bits)
        doubled = Cat(C(1, 1), rest)
        difference = wire(m, doubled - self.total)
        fits = ~difference[-1]
        m.d.comb += self.done.eq(self.o[-1] & busy)
        with m.If(self.start):
            m.d.sync += [busy.eq(1), rest.eq(0), self.o.eq(0), self.length.eq(0)]
        with m.Elif(self.o[-1]):
            m.d.sync += busy.eq(0)
        with m.Elif(busy):
            m.d.sync += [rest.eq(Mux(fits, difference, doubled)), self.o.eq(Cat(fits, self.o))]
            with m.If(~self.o.any()):
                m.d.sync += self.length.eq(self.length + 1)
        return m
