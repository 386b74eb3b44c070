"""The adder of a read-modify-write: of an exact sum, or of two scores that lie in its word."""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import EXACT_LSB, PV_BITS, SCORE_BITS, SCORE_LSB
from nearflash.gateware.attention.numerics.carry import carry_add
from nearflash.gateware.attention.numerics.product import PRODUCT, PRODUCT_BITS, ExactProduct
from nearflash.gateware.fp.pipeline import output, register

__all__ = ["PAIR_PLACE", "PAIR_SHIFT", "WordAdd"]

PAIR_PLACE = 21
"""Place of the upper of two int4 products above the lower one."""
PAIR_SHIFT = 6
"""From the least bit of int4 products to 2^SCORE_LSB."""
_CUT_BITS = SCORE_LSB - EXACT_LSB


class WordAdd(wiring.Component):
    """o = i + product; or two sums side by side.

    The word is one exact sum. With `scores`, its lower 2·SCORE_BITS bits are two scores, and each gets the product;
    with `pair` too, one gets the lower and one the upper of the two products of int4 codes. What a bit adds to the word
    is chosen in the adder's own LUT.

    Timing: latency LATENCY cycles, one result a cycle, free-running. A word that is read again less than LATENCY cycles
    after it was, plus those of the memory, is not there yet: the caller keeps them apart.
    Numerics: exact, every sum wraps. Sums in units of 2^EXACT_LSB, scores of 2^SCORE_LSB: of a product what is above,
    so that it must have been truncated (or be an integer, as `ExactProduct` places it).

    Members: i (PV_BITS bits), product (PRODUCT), scores, pair, borrow (the lower product of a pair is negative), o.
    """

    LATENCY = 2

    i: In(PV_BITS)
    product: In(PRODUCT)
    scores: In(1)
    pair: In(1)
    borrow: In(1)
    o: Out(PV_BITS)

    def elaborate(self, platform: Any) -> Module:
        """Two segments of the carry chain."""
        m = Module()
        names = ("product", "scores", "pair", "borrow")
        early = {name: getattr(self, name) for name in names}
        late = {name: register(m, value) for name, value in early.items()}
        # Cycle 0: the sum's lower bits, or the lower score.
        product = early["product"]
        low = register(m, carry_add(m, self.i[:SCORE_BITS], self._term(early, upper=False), product.negative))
        # Cycle 1: the other bits, or the upper score, with a carry of its own.
        i, product = register(m, self.i[SCORE_BITS:]), late["product"]
        carry = Mux(late["scores"], product.negative | late["borrow"], low[SCORE_BITS])
        high = carry_add(m, i, self._term(late, upper=True), carry)
        o = output(m, self.o)
        m.d.sync += o.eq(Cat(low[:SCORE_BITS], high)[:PV_BITS])
        return m

    def _term(self, at: dict[str, Any], *, upper: bool) -> Value:
        """Choose what is added to the lower SCORE_BITS bits of the word, or to all others."""
        bits, negative = at["product"].bits, at["product"].negative
        pair, borrow = bits[ExactProduct.INTEGER_PLACE :], at["borrow"]
        if upper:
            every = Cat(bits[SCORE_BITS:], negative.replicate(PV_BITS - PRODUCT_BITS))
            sign = pair[2 * PAIR_PLACE].replicate(SCORE_BITS)
            one = Cat(borrow.replicate(PAIR_SHIFT), pair[PAIR_PLACE : 2 * PAIR_PLACE], sign)
        else:
            every = bits[:SCORE_BITS]
            one = Cat(C(0, PAIR_SHIFT), pair[:PAIR_PLACE], borrow.replicate(SCORE_BITS))
        score = Mux(at["pair"], one[:SCORE_BITS], bits[_CUT_BITS : _CUT_BITS + SCORE_BITS])
        return Cat(Mux(at["scores"], score, every[:SCORE_BITS]), every[SCORE_BITS:])
