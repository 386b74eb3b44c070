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

from amaranth.hdl import Array, Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import QK_BITS
from nearflash.gateware.attention.numerics.carry import carry_add
from nearflash.gateware.attention.numerics.product import PRODUCT, magnitude_exceeds
from nearflash.gateware.fp.pipeline import delay, register, wire

__all__ = ["LANES", "ExactDot"]

LANES = 4
"""Products of a beat."""
_LOW = QK_BITS // 2


class ExactDot(wiring.Component):
    """The sum of products over lanes and beats, from `first` to `last`; several such sums may go on at once.

    Timing: the result is there LATENCY cycles after its last beat, in the cycle of `o_valid` only; one beat a cycle,
    free-running; beats may have gaps.
    Numerics: exact; 64 beats at most fit (d = 256). Equals nearflash.model.attention.numerics.dot (`exact_dot`,
    `dot_truncated`).

    Parameters: sums, how many go on at once, each with beats of its own.
    Members: index (of the beat's sum), products (PRODUCT, four), valid, first, last, nonfinite (of the beat),
    limit_shift (4 bits, constant over the beats), o (signed, QK_BITS, units of 2^EXACT_LSB), o_valid, o_nonfinite and
    o_exceeds (of any beat; `exceeds` is the range rule, nearflash.model.attention.numerics.product.exceeds).
    """

    LATENCY = 4

    def __init__(self, sums: int = 1) -> None:
        self._sums = sums
        super().__init__(
            {
                "index": In(range(sums)),
                "products": In(PRODUCT).array(LANES),
                **dict.fromkeys(("valid", "first", "last", "nonfinite"), In(1)),
                "limit_shift": In(4),
                "o": Out(signed(QK_BITS)),
                **dict.fromkeys(("o_valid", "o_nonfinite", "o_exceeds"), Out(1)),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        """Build tree and accumulator."""
        m = Module()
        terms = [Cat(product.bits, product.negative) for product in self.products]
        signs = [delay(m, product.negative, level) for product, level in zip(self.products, (0, 0, 1, 2), strict=True)]
        # Cycle 0: lower sums of pairs. Cycle 1: their upper sums; lower sum of all. Cycle 2: its upper sum.
        low = [register(m, carry_add(m, terms[k][:_LOW], terms[k + 1][:_LOW], signs[k // 2])) for k in (0, 2)]
        high = [register(m, term[_LOW:].as_signed()) for term in terms]
        high = [register(m, carry_add(m, high[k], high[k + 1], low[k // 2][_LOW])) for k in (0, 2)]
        low_sum = register(m, carry_add(m, low[0][:_LOW], low[1][:_LOW], signs[2]))
        high_sum = register(m, carry_add(m, high[0], high[1], low_sum[_LOW]))
        # Cycles 2 and 3: accumulate.
        below = self._accumulate(m, 2, low_sum[:_LOW], signs[3], _LOW + 1)
        above = self._accumulate(m, 3, high_sum, below[_LOW], QK_BITS - _LOW)
        m.d.comb += [
            self.o.eq(Cat(register(m, below[:_LOW]), above)),
            self.o_valid.eq(delay(m, self.valid & self.last, self.LATENCY)),
        ]
        exceeds = Cat(magnitude_exceeds(m, product, self.limit_shift) for product in self.products)
        self._accumulate_flag(m, 0, self.nonfinite, self.o_nonfinite)
        self._accumulate_flag(m, 1, register(m, exceeds).any(), self.o_exceeds)
        return m

    def _accumulate(self, m: Module, cycle: int, term: Value, carry: Value, bits: int) -> Value:
        """The running sum modulo 2^bits; its topmost bit is the carry where `bits` has one more than the term."""
        total = self._total(m, cycle, bits)
        before = Mux(delay(m, self.first, cycle), 0, total if term.shape().signed else total[: len(term)])
        before = before.as_signed() if term.shape().signed else before
        return self._put(m, cycle, wire(m, carry_add(m, term, before, carry)[:bits]))

    def _accumulate_flag(self, m: Module, cycle: int, flag: Value, port: Value) -> None:
        seen, first = self._total(m, cycle, 1), delay(m, self.first, cycle)
        after = self._put(m, cycle, wire(m, flag | (seen & ~first)))
        m.d.comb += port.eq(delay(m, after, self.LATENCY - 1 - cycle))

    def _total(self, m: Module, cycle: int, bits: int) -> Value:
        """Take the partial sum of the beat that came `cycle` cycles ago."""
        self._totals = Array(Signal(bits, name=f"total_{cycle}_{k}", reset_less=True) for k in range(self._sums))
        self._index = delay(m, self.index, cycle)
        return wire(m, self._totals[self._index])

    def _put(self, m: Module, cycle: int, total: Value) -> Value:
        """Keep it, as the beat states; and as it is a cycle later: in a register of its own, which needs no choice."""
        with m.If(delay(m, self.valid, cycle)):
            m.d.sync += self._totals[self._index].eq(total)
        return register(m, total)
