"""Linear maps over GF(2): what CRCs, BCH codes and scramblers are made of.

A map is a list of columns: `columns[k]` is an integer with the outputs that input bit k flips. Inputs are taken in
groups; each sum within a group is made once and used by all outputs that need it, which saves LUTs where outputs are
many and inputs few.
"""

from functools import reduce
from operator import xor

from amaranth.hdl import C, Cat, Module, Signal, Value

__all__ = ["apply", "power", "product"]


def apply(
    m: Module, columns: list[int], value: Value, width: int, *, group: int = 4, registered: bool = False
) -> Value:
    """The map's `width` outputs for `value`, whose bit k belongs to columns[k].

    Sums of `group` inputs are shared (1: nothing is); with `registered` they are registers, the outputs a cycle late.
    """
    domain = m.d.sync if registered else m.d.comb
    terms: list[list[Value]] = [[] for _ in range(width)]
    for start in range(0, len(columns), group):
        bits = value[start : start + group]
        sums: dict[int, Value] = {}
        for row in range(width):
            chosen = sum((column >> row & 1) << k for k, column in enumerate(columns[start : start + group]))
            if chosen:
                if chosen not in sums:
                    sums[chosen] = Signal(name=f"sum_{start}_{chosen}", reset_less=True)
                    domain += sums[chosen].eq((bits & chosen).xor())
                terms[row].append(sums[chosen])
    return Cat(reduce(xor, row) if row else C(0, 1) for row in terms)


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
