"""Threshold: finds, digit by digit, the largest key at which enough entries, or enough weight, lie at or above it.

A scan gives the sums of all bins of one digit, the largest digit first. The scan ends (in effect) at the first bin that
brings the entries to `count`, or their weight to mass · total / 2^16, or is the last one. The next scan, of the bins of
the next digit within that bin, goes on with what was left. After the last scan `left` + 1 entries are still to be taken
of those with the threshold key itself.

Numerics: exact. rest = ceil(mass · total / 2^16) - 1, by 16 steps of rest = floor((rest + bit · total) / 2) from -1.
"""

from amaranth import C, Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import TOKEN_BITS
from nearflash.gateware.fp.pipeline import wire

__all__ = ["MASS_BITS", "Threshold"]

MASS_BITS = 16
"""Bits of a mass, in 2^-16 of the total weight."""


class Threshold(wiring.Component):
    """Counts down entries and weight.

    Parameters: digit_bits; count_bits, width of the sums of entries; weight_bits, of the sums of weights (0: none).

    Members
    -------
    start : In, takes `count` (entries wanted) and `mass` (0: by count only).
    total : In, all weight. multiply : In, a step of mass · total; MASS_BITS steps between `start` and the first scan.
    scan : In, `digit`, `entries` and `weight` are a bin of a scan.
    take : In, `entries` of the threshold key are passed, after the scans.
    key : Out, the digits found, the latest one lowest. left : Out, entries still wanted, less one.
    """

    def __init__(self, digit_bits: int, count_bits: int, weight_bits: int) -> None:
        self._digit_bits, self._weight_bits = digit_bits, weight_bits
        super().__init__(
            {
                "start": In(1),
                "count": In(TOKEN_BITS),
                "mass": In(MASS_BITS),
                "total": In(weight_bits),
                "multiply": In(1),
                "scan": In(1),
                "digit": In(digit_bits),
                "entries": In(count_bits),
                "weight": In(weight_bits),
                "take": In(1),
                "key": Out(2 * digit_bits),
                "left": Out(signed(TOKEN_BITS + 1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A found bin keeps `left` and `rest` as they were before it."""
        m = Module()
        found, passed = Signal(), Signal()
        # The highest digit begins a scan, whatever the last one has found.
        searching = wire(m, self.scan & (self.digit.all() | ~found))
        below = wire(m, (self.left - self.entries)[: TOKEN_BITS + 1].as_signed())
        enough = below[-1] | self._weight_reached(m, passed) if self._weight_bits else below[-1]
        stop = wire(m, searching & (enough | ~self.digit.any()))
        m.d.comb += passed.eq(searching & ~stop)
        with m.If(searching):
            m.d.sync += found.eq(stop)
        with m.If(stop):
            m.d.sync += self.key.eq(Cat(self.digit, self.key[: self._digit_bits]))
        with m.If(self.start):
            # One less than the count, so that "enough" is a sign bit.
            m.d.sync += self.left.eq(self.count - 1)
        # A bin that is passed is taken as a whole; entries at the threshold are counted as they are taken.
        with m.Elif(passed | self.take):
            m.d.sync += self.left.eq(below)
        return m

    def _weight_reached(self, m: Module, passed: Value) -> Value:
        """One adder multiplies, before the scans, and counts down, in them."""
        mass, by_mass = Signal(MASS_BITS), Signal()
        rest = Signal(signed(self._weight_bits + 1))
        product, fall = Mux(mass[0], self.total, 0), ~Cat(self.weight, C(0, 1))
        step = wire(m, Mux(self.multiply, product, fall).as_signed())
        # With a digit below both for the carry it is one adder: two are the longest path of the whole kernel.
        total = Cat(C(1, 1), rest).as_signed() + Cat(~self.multiply, step).as_signed()
        below = wire(m, total[1 : len(rest) + 2].as_signed())
        with m.If(self.start):
            m.d.sync += [mass.eq(self.mass), by_mass.eq(self.mass.any()), rest.eq(-1)]
        with m.Elif(self.multiply):
            m.d.sync += [mass.eq(mass >> 1), rest.eq(below >> 1)]
        with m.Elif(passed):
            m.d.sync += rest.eq(below)
        return by_mass & below[-1]
