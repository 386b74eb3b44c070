"""Exact dot product: four products a beat, summed in a tree and over beats.

    products[0] -+
                 + -+
    products[1] -+  |
                    + -> accumulator -> o
    products[2] -+  |
                 + -+
    products[3] -+

The upper half of every sum is one cycle behind the lower one. A product's sign is still to be added (one's complement);
each of the four goes into the carry of one of the four adders.
"""

from typing import Any

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.numbers import QK_BITS
from nearflash.gateware.fp.pipeline import delay, register
from nearflash.gateware.num.carry import carry_add
from nearflash.gateware.num.product import PRODUCT, magnitude_exceeds

__all__ = ["LANES", "ExactDot"]

LANES = 4
"""Products of a beat."""
_LOW = QK_BITS // 2


class ExactDot(wiring.Component):
    """The sum of products over lanes and beats, from `first` to `last`.

    Timing: the result is there LATENCY cycles after its last beat, in the cycle of `o_valid` only; one beat a cycle,
    free-running; beats may have gaps.
    Numerics: exact; 64 beats at most fit (d = 256). Equals nearflash.model.num.dot (`exact_dot`, `cut_dot`).

    Members: products (PRODUCT, four), valid, first, last, nonfinite (of the beat), limit_shift (4 bits, constant over
    the beats), o (signed, QK_BITS, units of 2^EXACT_LSB), o_valid, o_nonfinite and o_exceeds (of any beat; `exceeds` is
    the range rule, nearflash.model.num.product.exceeds).
    """

    LATENCY = 4

    products: In(PRODUCT).array(LANES)
    valid: In(1)
    first: In(1)
    last: In(1)
    nonfinite: In(1)
    limit_shift: In(4)
    o: Out(signed(QK_BITS))
    o_valid: Out(1)
    o_nonfinite: Out(1)
    o_exceeds: Out(1)

    def elaborate(self, platform: Any) -> Module:
        """Build tree and accumulator."""
        m = Module()
        terms = [Cat(product.bits, product.negative) for product in self.products]
        signs = [delay(m, product.negative, level) for product, level in zip(self.products, (0, 0, 1, 2), strict=True)]
        valid, first = self.valid, self.first
        # Cycle 0: lower sums of pairs. Cycle 1: their upper sums; lower sum of all. Cycle 2: its upper sum.
        low = [register(m, carry_add(m, terms[k][:_LOW], terms[k + 1][:_LOW], signs[k // 2])) for k in (0, 2)]
        high = [register(m, term[_LOW:].as_signed()) for term in terms]
        high = [register(m, carry_add(m, high[k], high[k + 1], low[k // 2][_LOW])) for k in (0, 2)]
        low_sum = register(m, carry_add(m, low[0][:_LOW], low[1][:_LOW], signs[2]))
        high_sum = register(m, carry_add(m, high[0], high[1], low_sum[_LOW]))
        # Cycles 2 and 3: accumulate.
        below = self._accumulate(m, low_sum[:_LOW], signs[3], delay(m, valid, 2), delay(m, first, 2), _LOW + 1)
        above = self._accumulate(m, high_sum, below[_LOW], delay(m, valid, 3), delay(m, first, 3), QK_BITS - _LOW)
        m.d.comb += [
            self.o.eq(Cat(register(m, below[:_LOW]), above)),
            self.o_valid.eq(delay(m, valid & self.last, self.LATENCY)),
        ]
        exceeds = Cat(magnitude_exceeds(m, product, self.limit_shift) for product in self.products)
        self._accumulate_flag(m, self.nonfinite, valid, first, self.o_nonfinite, self.LATENCY)
        late = [register(m, value) for value in (exceeds, valid, first)]
        self._accumulate_flag(m, late[0].any(), *late[1:], self.o_exceeds, self.LATENCY - 1)
        return m

    def _accumulate(self, m: Module, term: Value, carry: Value, valid: Value, first: Value, bits: int) -> Value:
        """The running sum modulo 2^bits; its topmost bit is the carry where `bits` has one more than the term."""
        total = Signal(bits, reset_less=True)
        before = Mux(first, 0, total if term.shape().signed else total[: len(term)])
        with m.If(valid):
            m.d.sync += total.eq(carry_add(m, term, before.as_signed() if term.shape().signed else before, carry))
        return total

    def _accumulate_flag(self, m: Module, flag: Value, valid: Value, first: Value, port: Value, latency: int) -> None:
        seen = Signal(reset_less=True)
        with m.If(valid):
            m.d.sync += seen.eq(flag | (seen & ~first))
        m.d.comb += port.eq(delay(m, seen, latency - 1))
