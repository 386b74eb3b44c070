"""Long sums as one carry chain each."""

from typing import Any

from amaranth.hdl import C, Cat, Module, Value

from nearflash.gateware.fp.pipeline import wire

__all__ = ["carry_add"]


def carry_add(m: Module, a: Value, b: Value, carry: Any) -> Value:
    """a + b + carry, one bit wider than the wider operand; signed where both are.

    The carry enters at an extra bit below, so that synthesis makes one chain of it, not two adders.
    """
    low_a, low_b = Cat(C(1, 1), a), Cat(carry, b)
    if a.shape().signed and b.shape().signed:
        return wire(m, (low_a.as_signed() + low_b.as_signed())[1:].as_signed())
    return wire(m, (low_a + low_b)[1:])
