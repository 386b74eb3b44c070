"""Factors of a quantised index row: w = RNE(q·scale) and b = RNE(q·zero) from the lanes' exact products.

A product stays in one's complement: rounding it up in magnitude is adding 1 where it is positive, 0 where negative, to
its truncated bits; the other way round where it is not.

Timing: latency LATENCY cycles, one set of heads a cycle, free-running.
Numerics: fp16 products -> w: 18 bits, least bit 2^-10 (int4) or 2^-14 (int8); b: 36 bits, least bit 2^-16; RNE.
"""

from amaranth import Cat, Module, Mux, Value
from amaranth.hdl import C, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import EXACT_LSB, SCORE_BITS, SCORE_LSB, score_limit_log2
from nearflash.gateware.attention.engine.lanes import FACTOR_BITS
from nearflash.gateware.attention.numerics.product import PRODUCT
from nearflash.gateware.fp.pipeline import delay, output, register, wire

__all__ = ["Factor"]

_INT4_LSB, _INT8_LSB = -10, -14
_W_LIMIT_BITS = 6  # |w|·2^(bits of a code) < limit: int4 2^10 / 2^4, int8 2^14 / 2^8
_LIMIT_SHIFT_MAX = 8


class Factor(wiring.Component):
    """w and b of one head.

    Members: scale, zero (PRODUCT: q·scale, q·zero), int4, limit_shift (4 bits), w (signed, FACTOR_BITS), b (signed,
    SCORE_BITS), outside (the range rule is broken).
    """

    LATENCY = 3

    scale: In(PRODUCT)
    zero: In(PRODUCT)
    int4: In(1)
    limit_shift: In(4)
    w: Out(signed(FACTOR_BITS))
    b: Out(signed(SCORE_BITS))
    outside: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: which way to round. Cycle 1: round. Cycle 2: range."""
        m = Module()
        int4_drop, int8_drop, b_drop = (lsb - EXACT_LSB for lsb in (_INT4_LSB, _INT8_LSB, SCORE_LSB))
        w_wide = Mux(self.int4, self._truncate(self.scale, int4_drop), self._truncate(self.scale, int8_drop))
        w_up = Mux(self.int4, self._up(self.scale, int4_drop), self._up(self.scale, int8_drop))
        b_wide, b_up = self._truncate(self.zero, b_drop), self._up(self.zero, b_drop)
        w, b = (register(m, register(m, wide) + register(m, up)) for wide, up in ((w_wide, w_up), (b_wide, b_up)))
        shift = delay(m, self.limit_shift, 2)
        w_outside = self._exceeds(m, w, shift, score_limit_log2(1) + _W_LIMIT_BITS)
        b_outside = self._exceeds(m, b, shift, score_limit_log2(1) - SCORE_LSB)
        narrow = w[FACTOR_BITS - 1 :]
        w_outside |= narrow.any() & ~narrow.all()
        for port, value in ((self.w, w[:FACTOR_BITS]), (self.b, b[:SCORE_BITS]), (self.outside, w_outside | b_outside)):
            o = output(m, port)
            m.d.sync += o.eq(value)
        return m

    def _truncate(self, product: Value, drop: int) -> Value:
        """The bits above, as a signed number in one's complement."""
        return Cat(product.bits[drop:], product.negative).as_signed()

    def _up(self, product: Value, drop: int) -> Value:
        """Compute what is to be added to them."""
        guard, odd = product.bits[drop - 1] ^ product.negative, product.bits[drop] ^ product.negative
        below = product.bits[: drop - 1]
        sticky = Mux(product.negative, ~below.all(), below.any())
        return Cat((guard & (sticky | odd)) ^ product.negative, C(0, 1)).as_signed()

    def _exceeds(self, m: Module, value: Value, shift: Value, limit_log2: int) -> Value:
        """|value| >= 2^(limit_log2 - shift): a bit there or above, or for the negative limit itself all below."""
        lowest = limit_log2 - _LIMIT_SHIFT_MAX
        negative = value[-1]
        bits = wire(m, value[:-1] ^ negative.replicate(len(value) - 1))
        at, above = bits[lowest:limit_log2], bits[limit_log2:]
        counted = wire(m, Cat(shift >= _LIMIT_SHIFT_MAX - k for k in range(_LIMIT_SHIFT_MAX)))
        full = bits[:lowest].all() & (at | counted).all()
        return above.any() | (at & counted).any() | (negative & full)
