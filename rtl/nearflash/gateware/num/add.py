"""The adder of a read-modify-write of exact sums."""

from typing import Any

from amaranth.hdl import Cat, Module, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attend.numbers import PV_BITS
from nearflash.gateware.fp.pipeline import output, register
from nearflash.gateware.num.carry import carry_add
from nearflash.gateware.num.product import PRODUCT

__all__ = ["ExactAdd"]


class ExactAdd(wiring.Component):
    """o = i + product, in two segments of the carry chain.

    Timing: latency LATENCY cycles, one result a cycle, free-running. A sum that is read again less than LATENCY cycles
    after it was, plus those of the memory, is not there yet: the caller keeps them apart.
    Numerics: exact; wraps past `bits` bits.

    Parameters: bits, width of the sum, more than half of which a product covers.
    Members: i, o (signed, `bits` wide, units of 2^EXACT_LSB), product (PRODUCT).

    Raises ValueError for a width that a product does not fit.
    """

    LATENCY = 2

    def __init__(self, bits: int = PV_BITS) -> None:
        if bits <= PRODUCT.size:
            raise ValueError(f"bits must be more than a product's {PRODUCT.size}, not {bits!r}")
        self._low = bits // 2
        super().__init__({"i": In(signed(bits)), "product": In(PRODUCT), "o": Out(signed(bits))})

    def elaborate(self, platform: Any) -> Module:
        """Build the adder."""
        m = Module()
        place, term = self._low, Cat(self.product.bits, self.product.negative)
        # Cycle 0: the lower segment. Cycle 1: the upper one.
        low = register(m, carry_add(m, self.i[:place], term[:place], self.product.negative))
        i_high, term_high = register(m, self.i[place:].as_signed()), register(m, term[place:].as_signed())
        o = output(m, self.o)
        m.d.sync += o.eq(Cat(low[:place], carry_add(m, i_high, term_high, low[place])))
        return m
