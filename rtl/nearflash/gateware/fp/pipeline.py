"""Registers and shifters that the floating point units are made of.

Datapath registers have no reset, so that synthesis can put delay lines into shift-register LUTs and operand and product
registers into DSP blocks. A shift is a chain of radix-4 digits, each one 4:1 multiplexer (one LUT6) a bit deep.

Amaranth elaborates an unnamed expression again at each use, uses within uses exponentially: the results of a chain's
links are wires.
"""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value

__all__ = ["delay", "digit_places", "normalize_digit", "output", "register", "select_digit", "shift_right", "wire"]


def register(m: Module, value: Any, *, src_loc_at: int = 0) -> Any:
    """`value` one cycle later; the register is named after the variable that it is assigned to."""
    shape = value.shape() if hasattr(value, "shape") else Value.cast(value).shape()
    stage = Signal(shape, reset_less=True, src_loc_at=1 + src_loc_at)
    m.d.sync += stage.eq(value)
    return stage


def output(m: Module, port: Any) -> Any:
    """The register that drives an output port."""
    last = Signal(port.shape(), reset_less=True)
    m.d.comb += port.eq(last)
    return last


def delay(m: Module, value: Any, cycles: int) -> Any:
    """`value` after `cycles` cycles."""
    for _ in range(cycles):
        value = register(m, value, src_loc_at=1)
    return value


def wire(m: Module, value: Value, *, src_loc_at: int = 0) -> Value:
    """`value` under a name, for more than one use; the name is that of the variable that it is assigned to."""
    named = Signal(value.shape(), src_loc_at=1 + src_loc_at)
    m.d.comb += named.eq(value)
    return named


def select_digit(digit: Value, options: list[Value]) -> Value:
    """options[digit], for a digit of one or two bits: one multiplexer, 2:1 or 4:1, a bit."""
    if len(digit) == 1:
        return Mux(digit, options[1], options[0])
    return Mux(digit[1], Mux(digit[0], options[3], options[2]), Mux(digit[0], options[1], options[0]))


def digit_places(bits: int) -> list[slice]:
    """Find the digits of a `bits` wide number, two bits each but perhaps the last, most significant first."""
    return [slice(max(top - 2, 0), top) for top in range(bits, 0, -2)]


def normalize_digit(m: Module, value: Value, place: slice) -> tuple[Value, Value]:
    """Shift `value` left by its number of leading zeros, as far as the digit at `place` tells it; and that digit."""
    width, step, count = len(value), 1 << place.start, 1 << (place.stop - place.start)
    empty = [~value[max(0, width - (k + 1) * step) : max(0, width - k * step)].any() for k in range(3)]
    digit = wire(m, Cat(empty[0] & (~empty[1] | empty[2]), empty[0] & empty[1]) if count == 4 else empty[0])
    shifted = wire(m, select_digit(digit, [Cat(C(0, k * step), value)[:width] for k in range(count)]))
    return shifted, digit


def shift_right(m: Module, value: Value, distance: Value) -> tuple[Value, Value]:
    """`value >> distance`; and whether a one went out."""
    sticky: Value = C(0, 1)
    for place in digit_places(len(distance)):
        digit, step = distance[place], 1 << place.start
        lost = [value[k * step : (k + 1) * step].any() for k in range((1 << len(digit)) - 1)]
        reached = [digit.any(), digit[-1], digit.all()]
        sticky |= Cat(bit & enough for bit, enough in zip(lost, reached, strict=False)).any()
        value = wire(m, select_digit(digit, [value[k * step :] for k in range(1 << len(digit))])[: len(value)])
    return value, sticky
