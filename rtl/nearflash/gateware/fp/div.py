"""fp32 quotient, by non-restoring division, two quotient bits a cycle."""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.fp.raw import FLAGS, RAW, SIG_BITS
from nearflash.gateware.fp.round import Round

__all__ = ["Div"]

_QUOTIENT_BITS = SIG_BITS + 2  # in (1/2, 2): a bit may be lost to normalising, and there is the guard bit
_BITS_PER_CYCLE = 2


class Div(wiring.Component):
    """o = a / b.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: fp32, rounds once, to nearest even; equals nearflash.model.fp.div to the bit, exceptions too.

    Members: a, b, o (RAW), flags (FLAGS; `div_by_zero` for a finite a other than zero, `invalid` for 0/0 and inf/inf).
    """

    a: In(RAW)
    b: In(RAW)
    o: Out(RAW)
    flags: Out(FLAGS)

    def __init__(self) -> None:
        self._round = Round()
        self._cycles = _QUOTIENT_BITS // _BITS_PER_CYCLE
        self.LATENCY = self._cycles + self._round.LATENCY
        super().__init__()

    def elaborate(self, platform: Any) -> Module:
        """Build the divider."""
        m = Module()
        a, b = self.a, self.b
        # Cycles 0 to 12: the remainder stays in [-b, b); its sign says whether to subtract or to add b.
        remainder, divisor, quotient, positive = Cat(a.sig, C(0, 1)), b.sig, Value.cast(C(0, 0)), C(1, 1)
        for cycle in range(self._cycles):
            for step in range(_BITS_PER_CYCLE):
                doubled = remainder if cycle == step == 0 else Cat(C(0, 1), remainder[:-1])
                remainder = wire(m, _add_or_subtract(doubled, divisor, positive))
                positive = wire(m, ~remainder[-1])
                quotient = Cat(positive, quotient)
            remainder, divisor, quotient = (register(m, value) for value in (remainder, divisor, quotient))
            positive = wire(m, ~remainder[-1])
        # Behind the last cycle: the true remainder is zero where this one is 0 or -b.
        bits = Cat(divisor, C(0, 1))
        exact = ~remainder.any() | ((remainder ^ bits) == ((remainder | bits) << 1)[: len(bits)])
        whole = quotient[-1]
        exp, sign, zero, inf, nan, invalid, div_by_zero = (delay(m, v, self._cycles) for v in self._specials())
        m.submodules.round = rounder = self._round
        m.d.comb += [
            rounder.i.sig.eq(
                Mux(whole, Cat(quotient[0] | ~exact, quotient[1:]), Cat(~exact, quotient[: _QUOTIENT_BITS - 1]))
            ),
            rounder.i.exp.eq(exp - ~whole),
            Cat(rounder.i.sign, rounder.i.zero, rounder.i.inf, rounder.i.nan).eq(Cat(sign, zero, inf, nan)),
            Cat(rounder.invalid, rounder.div_by_zero).eq(Cat(invalid, div_by_zero)),
            self.o.eq(rounder.o),
            self.flags.eq(rounder.flags),
        ]
        return m

    def _specials(self) -> tuple[Value, ...]:
        """Exponent, sign, zero, inf, nan, invalid, div_by_zero."""
        a, b = self.a, self.b
        invalid = (a.zero & b.zero) | (a.inf & b.inf)
        nan = a.nan | b.nan | invalid
        inf, zero = (a.inf | b.zero) & ~nan, (a.zero | b.inf) & ~nan
        return (a.exp - b.exp)[:10], a.sign ^ b.sign, zero, inf, nan, invalid, inf & ~a.inf


def _add_or_subtract(a: Value, b: Value, subtract: Value) -> Value:
    """a + b or a - b modulo 2**len(a), on one carry chain."""
    inverted = Cat(b, C(0, len(a) - len(b))) ^ subtract.replicate(len(a))
    return (Cat(C(1, 1), a) + Cat(subtract, inverted))[1 : len(a) + 1]
