"""The exact product of two unpacked numbers, before rounding.

The significands multiply in DSP-shaped pieces, sum over k of (a * b[17 k : 17 k + 17]) << 17 k. Each piece is one DSP48
with its operand, product and sum registers, and the sum runs up the cascade, 17 bits a step:

    b[0:17]           -> | A, B | -> | M | -> | P | -> >> 17 -+
    b[17:34] -> |   | -> | A, B | -> | M | ------------------ + -> | P | -> >> 17 -> ...
"""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import delay, register
from nearflash.gateware.fp.raw import RAW, RawLayout

__all__ = ["Product"]

_PIECE_BITS = 17  # unsigned part of a DSP48's 18-bit operand; the other operand has room for 24


class Product(wiring.Component):
    """o = a * b, exact and normalised.

    Timing: latency LATENCY = 2 + ceil(b_bits / 17) cycles, one result a cycle, free-running; the normalising
    multiplexer is behind the last register.

    Parameters: b_bits, significand bits of b; one DSP block for each 17.
    Members: a (RAW), b (RawLayout(b_bits)), o (RawLayout(24 + b_bits); its exponent means nothing where it is zero),
    invalid (0 * inf).
    """

    def __init__(self, b_bits: int = RAW.sig_bits) -> None:
        self._pieces = -(-b_bits // _PIECE_BITS)
        self.LATENCY = 2 + self._pieces
        layout = RawLayout(b_bits)
        super().__init__({"a": In(RAW), "b": In(layout), "o": Out(RawLayout(RAW.sig_bits + b_bits)), "invalid": Out(1)})

    def elaborate(self, platform: Any) -> Module:
        """Build the multiplier."""
        m = Module()
        a, b = self.a, self.b
        product = self._multiply(m, a.sig, b.sig)
        # Cycle 0: sign, exponent, special values; they wait for the significand.
        mixed = (a.zero & b.inf) | (a.inf & b.zero)
        nan = a.nan | b.nan | mixed
        inf = (a.inf | b.inf) & ~nan
        zero = (a.zero | b.zero) & ~nan
        exp, sign, zero, inf, nan, invalid = (
            delay(m, value, self.LATENCY) for value in ((a.exp + b.exp)[:10], a.sign ^ b.sign, zero, inf, nan, mixed)
        )
        # Behind the last cycle: the product is in [1, 4).
        m.d.comb += [
            self.o.sig.eq(Mux(product[-1], product, product << 1)),
            self.o.exp.eq(exp + product[-1]),
            Cat(self.o.sign, self.o.zero, self.o.inf, self.o.nan).eq(Cat(sign, zero, inf, nan)),
            self.invalid.eq(invalid),
        ]
        return m

    def _multiply(self, m: Module, a: Value, b: Value) -> Value:
        low: list[Value] = []
        total: Value = C(0)
        for k in range(self._pieces):
            a = register(m, a)
            partial = register(m, a * delay(m, b[k * _PIECE_BITS : (k + 1) * _PIECE_BITS], k + 1))
            total = register(m, partial + (total >> _PIECE_BITS))
            low.append(delay(m, total[:_PIECE_BITS], self._pieces - 1 - k))
        return Cat(*low[:-1], total)[: len(self.o.sig)]
