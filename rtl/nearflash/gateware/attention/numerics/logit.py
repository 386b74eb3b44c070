"""From a score to a base-2 logit.

score -> 35 bits ─► two DSP blocks ─► >> 16 .. 37 ─► round, saturate -> o
      -> least bit, gates c: added in the first block
"""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import LOGIT_BITS, SCALE_LEAST_LOG2, SCALE_LIMIT_LOG2, SCORE_BITS
from nearflash.abi.formats import FP32
from nearflash.gateware.attention.numerics.carry import carry_add
from nearflash.gateware.fp.pipeline import delay, output, register, select_digit, wire

__all__ = ["ToLogit"]

_PIECE_BITS = 17  # unsigned part of a DSP48's 18-bit operand
_FIELD_LEAST, _FIELD_MOST = FP32.bias + SCALE_LEAST_LOG2, FP32.bias + SCALE_LIMIT_LOG2 - 1
_SHIFT_LEAST = FP32.mantissa_bits - 7


class ToLogit(wiring.Component):
    """o = i · scale, rounded to nearest even, saturated.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: units of 2^SCORE_LSB times fp32 in [2^-14, 2^8) -> units of 2^LOGIT_LSB, which is the same;
    equals nearflash.model.attention.numerics.logit.to_logit.

    Members: i (signed, SCORE_BITS), scale (fp32 bits), o (signed, LOGIT_BITS), outside (saturated; or the scale is out
    of its range, and then o is 0).
    """

    LATENCY = 7

    i: In(signed(SCORE_BITS))
    scale: In(FP32.bits)
    o: Out(signed(LOGIT_BITS))
    outside: Out(1)

    def elaborate(self, platform: Any) -> Module:
        """Build the multiplier, the shifter and the rounder."""
        m = Module()
        field = self.scale[FP32.mantissa_bits :]  # with the sign: a negative scale is out of range
        usable = delay(m, (field >= _FIELD_LEAST) & (field <= _FIELD_MOST), 6)
        distance = delay(m, (_FIELD_MOST - field)[:5], 4)
        product, below = self._multiply(m)
        # Cycle 4: shift by 16 and 4s; bit 0 is the guard bit. Cycle 5: shift by 1s; which way to round.
        guard_place = _SHIFT_LEAST - 2  # the product is without the score's least bit
        value = product[guard_place:].as_signed()
        value, lost = self._shift(m, value, distance[4:], 16)
        value, lost_too = self._shift(m, value, distance[2:4], 4)
        sticky = register(m, lost | lost_too | product[:guard_place].any() | below)
        value, lost = self._shift(m, register(m, value), register(m, distance[:2]), 1)
        up = register(m, value[0] & (sticky | lost | value[1]))
        above = value[LOGIT_BITS + 1 :]
        large, negative = register(m, above.any() & ~above.all()), register(m, value[-1])
        body = register(m, value[1 : LOGIT_BITS + 2].as_signed())
        # Cycle 6: round, with one bit more than a logit, as rounding may lead out of the range or into it; saturate.
        rounded = carry_add(m, body, C(0, signed(1)), up)
        outside = wire(m, large | (rounded[LOGIT_BITS] ^ rounded[LOGIT_BITS - 1]))
        saturated = Cat((~negative).replicate(LOGIT_BITS - 1), negative)
        o = output(m, self.o)
        m.d.sync += o.eq(Mux(usable, Mux(outside, saturated, rounded[:LOGIT_BITS]), 0))
        m.d.comb += self.outside.eq(register(m, outside | ~usable))
        return m

    def _multiply(self, m: Module) -> tuple[Value, Value]:
        """(score >> 1) · significand + what the score's least bit adds, 59 bits signed; and the bit half below.

        The score's 36 bits are one more than two DSP blocks take, hence the least bit goes another way.
        """
        sig = register(m, Cat(self.scale[: FP32.mantissa_bits], C(1, 1)))
        least = register(m, self.i[0])
        low, high = register(m, self.i[1 : 1 + _PIECE_BITS]), register(m, self.i[1 + _PIECE_BITS :].as_signed())
        extra = register(m, Mux(least, sig[1:], 0))
        low_sum = register(m, register(m, sig * low) + extra)
        high_product = register(m, register(m, sig) * register(m, high))
        high_sum = register(m, high_product + (low_sum >> _PIECE_BITS))
        return Cat(register(m, low_sum[:_PIECE_BITS]), high_sum), delay(m, least & sig[0], 3)

    def _shift(self, m: Module, value: Value, digit: Value, step: int) -> tuple[Value, Value]:
        """value >> digit · step, keeping the sign and the width; and whether a one went out."""
        options = [value >> k * step for k in range(1 << len(digit))]
        reached = [digit.any(), digit[-1], digit.all()]
        lost = [value[k * step : (k + 1) * step].any() & reached[k] for k in range((1 << len(digit)) - 1)]
        return wire(m, select_digit(digit, options)), Cat(lost).any()
