"""Kept nets: signals that logic synthesis keeps, so that it finds the small form of wide comparisons and multiplexers.

Left alone, open mappers trade LUTs for a level less wherever a signal comes late. Under an `If` a kept net would be its
value and the condition, so make it before.
"""

from typing import Any

from amaranth import Cat, Module, Signal, Value

__all__ = ["equal", "keep_net"]


def keep_net(m: Module, value: Value) -> Signal:
    """`value` as a signal that stays."""
    kept = Signal(len(value), name="kept_net", attrs={"keep": 1})
    m.d.comb += kept.eq(value)
    return kept


def equal(m: Module, first: Any, second: Any) -> Value:
    """Whether two values of one width are equal: three bits of each a LUT."""
    first, second = Value.cast(first), Value.cast(second)
    assert len(first) == len(second)
    same = (first[at : at + 3] == second[at : at + 3] for at in range(0, len(first), 3))
    return keep_net(m, Cat(*same)).all()
