"""From an exact sum to a score."""

from typing import Any

from amaranth.hdl import C, Module, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import EXACT_LSB, QK_BITS, SCORE_BITS, SCORE_LSB
from nearflash.gateware.attention.numerics.carry import carry_add
from nearflash.gateware.fp.pipeline import output, register

__all__ = ["ToScore"]

_DROP = SCORE_LSB - EXACT_LSB


class ToScore(wiring.Component):
    """o = i rounded to nearest even.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: units of 2^EXACT_LSB -> units of 2^SCORE_LSB; equals nearflash.model.attention.numerics.score.to_score.

    Members: i (signed, QK_BITS), o (signed, SCORE_BITS: the low bits where the score does not fit), outside (it does
    not fit).
    """

    LATENCY = 2

    i: In(signed(QK_BITS))
    o: Out(signed(SCORE_BITS))
    outside: Out(1)

    def elaborate(self, platform: Any) -> Module:
        """Build the rounder."""
        m = Module()
        # Cycle 0: which way to round; do all bits far above the score repeat a sign?
        up = register(m, self.i[_DROP - 1] & (self.i[: _DROP - 1].any() | self.i[_DROP]))
        above = self.i[_DROP + SCORE_BITS :]
        large = register(m, above.any() & ~above.all())
        body = register(m, self.i[_DROP : _DROP + SCORE_BITS + 1].as_signed())
        # Cycle 1: round. With one bit more than a score, as rounding may lead out of the range or into it.
        rounded = carry_add(m, body, C(0, signed(1)), up)
        o, outside = output(m, self.o), output(m, self.outside)
        m.d.sync += [o.eq(rounded), outside.eq(large | (rounded[SCORE_BITS] ^ rounded[SCORE_BITS - 1]))]
        return m
