"""Small pieces that the selection's datapaths share."""

from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value

from nearflash.gateware.fp.pipeline import wire

__all__ = ["larger", "strobe"]


def strobe(m: Module, pulse: Value, cycles: int) -> Signal:
    """Bit k: `pulse` of k + 1 cycles ago, as far as `cycles`; with a reset, unlike a delay of data."""
    past = Signal(cycles)
    m.d.sync += past.eq(Cat(pulse, past))
    return past


def larger(m: Module, a: Any, b: Any) -> Value:
    """The larger of two signed numbers."""
    return wire(m, Mux(a > b, a, b).as_signed())
