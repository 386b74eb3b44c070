"""Scatter network: puts packed elements where a bitmap has ones, by shifts of digits of the distance.

Element k belongs to the k-th one. What lies below the one at place j is as many zeros as the element moves up, so
distances never fall from an element to the next. Moved by the high digit of the distance first, then by the lower ones,
no two elements meet: each level is a 4:1 multiplexer an element. The levels' controls follow from the bitmap by the
inverse way, from the places to the packed elements, low digit first.

Source: Warren, Hacker's Delight, section 7-5 (expand).
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value

from nearflash.gateware.fp.pipeline import digit_places, select_digit, wire

__all__ = ["Level", "funnel", "prefix_counts", "register", "scatter", "scatter_levels"]


@dataclass(frozen=True)
class Level:
    """A level of the network: place j takes the element `digits[j]` · `step` places below."""

    step: int
    digits: list[Value]


def prefix_counts(m: Module, bits: Value) -> list[Value]:
    """Number of ones below each place of `bits`, and at the end that of all; a tree of sums."""
    if len(bits) == 1:
        return [C(0, 1), bits]
    half = len(bits) // 2
    low, high = prefix_counts(m, bits[:half]), prefix_counts(m, bits[half:])
    return [*low[:-1], *(wire(m, (low[-1] + count)[: len(bits).bit_length()]) for count in high)]


def funnel(m: Module, value: Value, place: Value, element_bits: int, count: int) -> Value:
    """`count` elements of `value` from element `place` on."""
    for digit in digit_places(len(place)):
        step, choices = 1 << digit.start, 1 << (digit.stop - digit.start)
        needed = (count + step - 1) * element_bits  # the lower digits shift by less than a step
        options = [value[k * step * element_bits :][:needed] for k in range(choices)]
        value = wire(m, select_digit(place[digit], options))
    return value


def scatter_levels(m: Module, bits: Value, distances: list[Value]) -> list[Level]:
    """Levels from the highest digit to the lowest, for a bitmap and the zeros below each of its places."""
    levels: list[Level] = []
    there = list(bits)
    for digit in reversed(digit_places((len(bits) - 1).bit_length())):
        step, choices = 1 << digit.start, 1 << (digit.stop - digit.start)
        digits = [wire(m, distance[digit]) for distance in distances]
        levels.insert(0, Level(step, digits))
        came: list[list[tuple[int, Value]]] = [[] for _ in there]
        for place, one in enumerate(there):
            for choice in range(min(choices, place // step + 1)):
                came[place - choice * step].append((place, wire(m, one & (digits[place] == choice))))
        # At most one of those that came is there: an OR is their multiplexer.
        there = [wire(m, Cat(here for _, here in each).any()) for each in came]
        distances = [wire(m, reduce(or_, (Mux(here, distances[place], 0) for place, here in each))) for each in came]
    return levels


def scatter(m: Module, packed: Value, bits: Value, levels: list[Level], element_bits: int) -> Value:
    """The packed elements at the ones of `bits`, zeros elsewhere."""
    elements = [packed.word_select(k, element_bits) for k in range(len(bits))]
    for level in levels:
        moved = []
        for place, digit in enumerate(level.digits):
            below = [place - choice * level.step for choice in range(1 << len(digit))]
            moved.append(select_digit(digit, [elements[k] if k >= 0 else C(0, element_bits) for k in below]))
        elements = [wire(m, element) for element in moved]
    return Cat(Mux(bit, element, 0) for bit, element in zip(bits, elements, strict=True))


def register(m: Module, enable: Value, value: Value, name: str | None = None) -> Signal:
    """`value` as it was in the last cycle with `enable`."""
    register = Signal(len(value), name=name, reset_less=True)
    with m.If(enable):
        m.d.sync += register.eq(value)
    return register
