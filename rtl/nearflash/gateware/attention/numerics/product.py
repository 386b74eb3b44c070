"""Exact product as a fixed-point number.

    a, b ─► x ─► << 4·(0..3) ─► << 16·(0..3), invert where negative ─► o

The significand of an fp16 operand is moved by the low two bits of its own exponent beforehand (14 bits, which the
multiplier has room for), so that two 4:1 multiplexers a bit place the product; the second one inverts and cuts in the
same LUT. An operand that is used more than once is brought to this form once, by `fp16_operand`.
"""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import EXACT_LSB, SCORE_LSB, score_limit_log2
from nearflash.abi.formats import FP16
from nearflash.gateware.fp.pipeline import delay, output, register, select_digit, wire

__all__ = [
    "MULTIPLICAND",
    "MULTIPLIER",
    "OPERAND",
    "PRODUCT",
    "PRODUCT_BITS",
    "ExactProduct",
    "fp16_operand",
    "magnitude_exceeds",
]

OPERAND = data.StructLayout({"value": 14, "places": 3, "negative": 1})
"""An fp16 number: its significand times 2^(exponent field mod 4), the field's upper bits (a subnormal's field counts
1), its sign. Equals nearflash.model.attention.numerics.product.fp16_operand."""
#: What a DSP block multiplies: numbers or integers.
MULTIPLICAND = data.StructLayout({"value": signed(25), "places": 3, "negative": 1})
MULTIPLIER = data.StructLayout({"value": signed(18), "places": 3, "negative": 1})
PRODUCT_BITS = 80
"""Bits of a magnitude: (2^11)^2 at 2^-48 up to (2^16)^2."""
#: A product in one's complement: the number signed(Cat(bits, negative)) + negative, in units of 2^EXACT_LSB.
PRODUCT = data.StructLayout({"bits": PRODUCT_BITS, "negative": 1})

_CUT_BITS = SCORE_LSB - EXACT_LSB
_LIMIT_SHIFT_MAX = 8
_FLOAT_BITS = 28  # of a product of fp16 significands that were moved
_LEAST_PLACE = 2  # exponent fields are at least 1, so that two bits are never reached


def fp16_operand(m: Module, bits: Value) -> Any:
    """The OPERAND of fp16 `bits`, which must be finite. Combinational."""
    fraction, field = bits[: FP16.mantissa_bits], bits[FP16.mantissa_bits : -1]
    normal = wire(m, field.any())
    significand = Cat(fraction, normal)
    distance = wire(m, Cat(field[0] | ~normal, field[1]))
    o = Signal(OPERAND)
    m.d.comb += [
        o.value.eq(select_digit(distance, [Cat(C(0, k), significand) for k in range(4)])),
        o.places.eq(field[2:]),
        o.negative.eq(bits[-1]),
    ]
    return o


def magnitude_exceeds(m: Module, product: Any, limit_shift: Value) -> Value:
    """|product| >= 2 · limit of the range rule; limit_shift: 4 bits, ceil(log2 r), at most 8. Combinational."""
    lowest = 1 + score_limit_log2(1) - EXACT_LSB - _LIMIT_SHIFT_MAX
    bits = wire(m, product.bits[lowest:] ^ product.negative.replicate(PRODUCT_BITS - lowest))
    counted = Cat(limit_shift >= _LIMIT_SHIFT_MAX - k for k in range(_LIMIT_SHIFT_MAX))
    return bits[_LIMIT_SHIFT_MAX:].any() | (bits[:_LIMIT_SHIFT_MAX] & counted).any()


class ExactProduct(wiring.Component):
    """o = a · b, exact; or truncated toward zero to a multiple of 2^SCORE_LSB.

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: operands as OPERAND holds fp16 -> fixed point, least bit 2^EXACT_LSB; equals
    nearflash.model.attention.numerics.product
    (`exact_product`, `multiply_truncated`). Other values, signed, are integers: `negative` must then be 0; with places
    INTEGER_PLACES o is their product times 2^INTEGER_PLACE, its lower 43 bits only, with SHORT_PLACES times
    2^SHORT_PLACE, its lower 36 bits only.

    Members: a (MULTIPLICAND), b (MULTIPLIER), truncate, o (PRODUCT).
    """

    LATENCY = 5
    #: Places of a and b for integers, and the bit of `o` that is the least one of their product.
    INTEGER_PLACES, INTEGER_PLACE = (1, 0), 2
    SHORT_PLACES, SHORT_PLACE = (4, 5), 34

    a: In(MULTIPLICAND)
    b: In(MULTIPLIER)
    truncate: In(1)
    o: Out(PRODUCT)

    def elaborate(self, platform: Any) -> Module:
        """Build the multiplier: one DSP block."""
        m = Module()
        # Cycles 0 to 2: multiply.
        product = delay(m, register(m, self.a.value) * register(m, self.b.value), 2)
        places = delay(m, register(m, self.a.places) + register(m, self.b.places), 2)
        negative, truncate = delay(m, self.a.negative ^ self.b.negative, 4), delay(m, self.truncate, 4)
        # Cycle 3: by 4 times 0 to 3. Above _FLOAT_BITS a product has bits only if it is an integer's.
        small, wide = product[:_FLOAT_BITS], _FLOAT_BITS + 12
        near = select_digit(
            places[:2], [small, Cat(C(0, 4), product)[:wide], Cat(C(0, 8), small), Cat(C(0, 12), small)]
        )
        near, above = register(m, near[:wide]), register(m, product[wide - 4 :])
        far = register(m, places[2:])
        # Cycle 4: by 16 times 0 to 3.
        placed = select_digit(far, [Cat(near, above), *(Cat(C(0, 16 * k), near) for k in (1, 2, 3))])
        placed = placed[_LEAST_PLACE : _LEAST_PLACE + PRODUCT_BITS]
        kept = Cat(Mux(truncate, C(0, _CUT_BITS), placed[:_CUT_BITS]), placed[_CUT_BITS:])
        o = output(m, self.o)
        m.d.sync += [o.bits.eq(kept ^ negative.replicate(PRODUCT_BITS)), o.negative.eq(negative)]
        return m
