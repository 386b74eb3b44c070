"""Linear maps over GF(2): what CRCs, BCH codes and scramblers are made of.

A map is a list of columns: `columns[k]` is an integer with the outputs that input bit k flips. Inputs are taken in
groups; each sum within a group is made once and used by all outputs that need it, which saves LUTs where outputs are
many and inputs few.
"""

from functools import reduce
from operator import xor

from amaranth.hdl import Module, Signal, Value

__all__ = ["apply", "power", "product"]


def apply(
    m: Module, columns: list[int], value: Value, width: int, *, group: int = 4, registered: bool = False
) -> Value:
    """The map's `width` outputs for `value`, whose bit k belongs to columns[k].

    Sums of `group` inputs are shared (1: nothing is); with `registered` they are registers, the outputs a cycle late.
    """
    domain = m.d.sync if registered else m.d.comb
    chosen: dict[tuple[int, int], int] = {}  # (first input, inputs of the group) -> place of their sum
    masks = [0] * width
    for start in range(0, len(columns), group):
        for row in range(width):
            inputs = sum((column >> row & 1) << k for k, column in enumerate(columns[start : start + group]))
            if inputs:
                masks[row] |= 1 << chosen.setdefault((start, inputs), len(chosen))
    # Both are vectors, and an output is the parity of masked ones: long sums of single bits take a C++ compiler
    # minutes and all memory.
    sums, outputs = Signal(len(chosen), reset_less=True), Signal(width)
    for (start, inputs), place in chosen.items():
        domain += sums[place].eq((value[start : start + group] & inputs).xor())
    for row, mask in enumerate(masks):
        m.d.comb += outputs[row].eq((sums & mask).xor())
    return outputs


def product(first: list[int], second: list[int]) -> list[int]:
    """The map that applies `second`, then `first`."""
    return [reduce(xor, (column for row, column in enumerate(first) if bits >> row & 1), 0) for bits in second]


def power(columns: list[int], exponent: int) -> list[int]:
    """The map applied `exponent` times."""
    result = [1 << k for k in range(len(columns))]
    while exponent:
        if exponent & 1:
            result = product(columns, result)
        columns = product(columns, columns)
        exponent >>= 1
    return result
