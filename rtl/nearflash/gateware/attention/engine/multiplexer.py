"""A multiplexer as a tree over the bits of its number: synthesis makes 4:1 multiplexers of it, not a decoder."""

from collections.abc import Sequence
from typing import Any

from amaranth import Mux
from amaranth.hdl import Value

__all__ = ["choose"]


def choose(options: Sequence[Any], number: Value) -> Value:
    """options[number]; there are a power of two of them, and only the bits of `number` that this takes are looked at.

    Raises ValueError for another count of options.
    """
    if len(options) & len(options) - 1 or not options:
        raise ValueError(f"options must be a power of two of values, not {len(options)!r}")
    level, place = [Value.cast(option) for option in options], 0
    while len(level) > 1:
        level = [Mux(number[place], high, low) for low, high in zip(level[::2], level[1::2], strict=True)]
        place += 1
    return level[0]
