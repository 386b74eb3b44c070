"""Exact fp16 product as a fixed-point number.

    a -> << exponent mod 4 -+
                            x -> << 4·(0..3) -> << 16·(0..3), invert where negative -> o
    b -> << exponent mod 4 -+

Each significand is first moved by the low two bits of its own exponent (14 bits, which the multiplier has room for), so
that two 4:1 multiplexers a bit place the product; the second one inverts and cuts in the same LUT.
"""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.numbers import EXACT_LSB, SCORE_LSB, score_limit_log2
from nearflash.abi.formats import FP16
from nearflash.gateware.fp.pipeline import delay, output, register, wire

__all__ = ["PRODUCT", "PRODUCT_BITS", "Product", "magnitude_exceeds"]

PRODUCT_BITS = 80
"""Bits of a magnitude: (2^11)^2 at 2^-48 up to (2^16)^2."""
#: A product in one's complement: the number signed(Cat(bits, negative)) + negative, in units of 2^EXACT_LSB.
PRODUCT = data.StructLayout({"bits": PRODUCT_BITS, "negative": 1})

_CUT_BITS = SCORE_LSB - EXACT_LSB
_LIMIT_SHIFT_MAX = 8
_FLOAT_BITS = 28  # of a product of fp16 significands that were moved


def magnitude_exceeds(m: Module, product: Any, limit_shift: Value) -> Value:
    """|product| >= 2 · limit of the range rule; limit_shift: 4 bits, ceil(log2 r), at most 8. Combinational."""
    lowest = 1 + score_limit_log2(1) - EXACT_LSB - _LIMIT_SHIFT_MAX
    bits = wire(m, product.bits[lowest:] ^ product.negative.replicate(PRODUCT_BITS - lowest))
    counted = Cat(limit_shift >= _LIMIT_SHIFT_MAX - k for k in range(_LIMIT_SHIFT_MAX))
    return bits[_LIMIT_SHIFT_MAX:].any() | (bits[:_LIMIT_SHIFT_MAX] & counted).any()


class Product(wiring.Component):
    """o = a · b, exact; or cut toward zero to a multiple of 2^SCORE_LSB.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: fp16, subnormals too -> fixed point, least bit 2^EXACT_LSB; equals nearflash.model.num.product
    (`exact_product`, `cut_product`). Where `nonfinite` is set, o means nothing.

    Parameters: integers, whether the multiplier also serves integers: with `integer` set, o is factor · code in units
    of 2^(EXACT_LSB + INTEGER_PLACE), its lower 43 bits only, and never `negative`; with `short` too, in units of
    2^(EXACT_LSB + SHORT_PLACE), its lower 36 bits only.
    Members: a, b (fp16 bits), cut, o (PRODUCT), nonfinite (an operand is an infinity or a NaN); with `integers` also
    integer, short, factor (signed, 18 bits), code (signed, 25 bits).
    """

    LATENCY = 5
    #: Bit of `o` that is the least one of an integer product.
    INTEGER_PLACE = 2
    #: The same for a short one.
    SHORT_PLACE = 34

    def __init__(self, integers: bool = False) -> None:
        self._integers = integers
        extra = {"integer": In(1), "short": In(1), "factor": In(signed(18)), "code": In(signed(25))} if integers else {}
        super().__init__({"a": In(16), "b": In(16), "cut": In(1), "o": Out(PRODUCT), "nonfinite": Out(1), **extra})

    def elaborate(self, platform: Any) -> Module:
        """Build the multiplier: one DSP block."""
        m = Module()
        # Cycle 0: significands, moved by 0 to 3. Cycles 1, 2: multiply.
        (a, a_places), (b, b_places) = (self._moved(m, bits) for bits in (self.a, self.b))
        negative = self.a[-1] ^ self.b[-1]
        if self._integers:  # an integer product moves by 4 or, in two parts, by 36, of which cycle 4 drops 2
            a, a_places = Mux(self.integer, self.code, a), Mux(self.integer, Mux(self.short, 4, 1), a_places)
            b, b_places = Mux(self.integer, self.factor, b), Mux(self.integer, Mux(self.short, 5, 0), b_places)
            negative &= ~self.integer
        product = delay(m, register(m, a) * register(m, b), 2)
        places = delay(m, register(m, a_places) + register(m, b_places), 2)
        negative, cut = delay(m, negative, 4), delay(m, self.cut, 4)
        # Cycle 3: by 4 times 0 to 3. Above _FLOAT_BITS a product has bits only if it is an integer's.
        small, wide = product[:_FLOAT_BITS], _FLOAT_BITS + 12
        near = _select(places[:2], [small, Cat(C(0, 4), product)[:wide], Cat(C(0, 8), small), Cat(C(0, 12), small)])
        near, above = register(m, near[:wide]), register(m, product[wide - 4 :])
        far = register(m, places[2:])
        # Cycle 4: by 16 times 0 to 3. Exponent fields are at least 1, so that two bits are never reached.
        placed = _select(far, [Cat(near, above), *(Cat(C(0, 16 * k), near) for k in (1, 2, 3))])[2 : 2 + PRODUCT_BITS]
        kept = Cat(Mux(cut, C(0, _CUT_BITS), placed[:_CUT_BITS]), placed[_CUT_BITS:])
        o = output(m, self.o)
        m.d.sync += [o.bits.eq(kept ^ negative.replicate(PRODUCT_BITS)), o.negative.eq(negative)]
        special = self.a[10:15].all() | self.b[10:15].all()
        m.d.comb += self.nonfinite.eq(delay(m, special, self.LATENCY))
        return m

    def _moved(self, m: Module, bits: Value) -> tuple[Value, Value]:
        """The significand times 2^(exponent field mod 4), and the field's upper bits; a subnormal's field counts 1."""
        fraction, field = bits[: FP16.mantissa_bits], bits[FP16.mantissa_bits : -1]
        normal = wire(m, field.any())
        significand = Cat(fraction, normal)
        distance = wire(m, Cat(field[0] | ~normal, field[1]))
        return _select(distance, [Cat(C(0, k), significand) for k in range(4)]), field[2:]


def _select(digit: Value, options: list[Value]) -> Value:
    return Mux(digit[1], Mux(digit[0], options[3], options[2]), Mux(digit[0], options[1], options[0]))
