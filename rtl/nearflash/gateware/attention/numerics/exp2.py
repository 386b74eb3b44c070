"""2 to the power of a fraction: a table of chords and one DSP block."""

from typing import Any

from amaranth.hdl import Array, C, Cat, Module, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.exp2 import (
    EXP2_CONSTANT_BITS,
    EXP2_FRACTION_BITS,
    EXP2_SEGMENTS_LOG2,
    EXP2_SLOPE_BITS,
    exp2_table,
)
from nearflash.gateware.fp.pipeline import register

__all__ = ["Exp2"]

_STEP_BITS = 16 - EXP2_SEGMENTS_LOG2


class Exp2(wiring.Component):
    """o = 2^(i / 2^16) · 1024, rounded.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: 16 fraction bits -> 1024 to 2048, at most 0.515 from the exact value (every input tested), monotone;
    equals nearflash.model.attention.numerics.exp2.significand.

    Members: i (16 bits), o (12 bits).
    """

    LATENCY = 3

    i: In(16)
    o: Out(12)

    def elaborate(self, platform: Any) -> Module:
        """Build table and multiplier."""
        m = Module()
        # Cycle 0: look up. Cycle 1: multiply. Cycle 2: add.
        constants, slopes = zip(*exp2_table(), strict=True)
        segment = self.i[_STEP_BITS:]
        constant = register(m, self._lookup(segment, constants, EXP2_CONSTANT_BITS))
        slope = register(m, self._lookup(segment, slopes, EXP2_SLOPE_BITS))
        product = register(m, slope * register(m, self.i[:_STEP_BITS]))
        total = register(m, product + register(m, constant))
        m.d.comb += self.o.eq(total[EXP2_FRACTION_BITS:])
        return m

    def _lookup(self, index: Value, values: tuple[int, ...], bits: int) -> Value:
        """values[index], bit by bit: a bit of 64 constants is one LUT."""
        columns = [Array(C(value >> bit & 1, 1) for value in values) for bit in range(bits)]
        return Cat(Value.cast(column[index]) for column in columns)
