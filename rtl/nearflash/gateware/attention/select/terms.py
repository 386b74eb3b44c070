"""EntryTerms: from stored entries of one query head to their terms, and to the numbers that keys are sums of.

    term = (mass << 16) >> min(top - floor(x_max), 63)            = m · 2^e, m of 16 bits, e of 0 to 16
    number = (term · R) >> (b - 9)  (probability)  or  x_max · 2^4  (logit): least bit 2^-12 as keys have it

Timing: SUM_LATENCY and NUMBER_LATENCY cycles; four entries a cycle, free-running.
Numerics: exact; equals nearflash.model.attention.select.selection (`terms`, `probabilities`); a number never passes
2^24 - 1.
"""

from amaranth import C, Cat, Module, Mux, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import MASS_BITS, MAX_LOGIT_BITS, TERM_BITS
from nearflash.gateware.attention.select.entry import ENTRY, FLOOR_BITS, FRACTION_BITS
from nearflash.gateware.attention.select.keystore import LANES
from nearflash.gateware.attention.select.reciprocal import RECIPROCAL_BITS
from nearflash.gateware.fp.pipeline import delay, register, shift_right, wire

__all__ = ["NUMBER_BITS", "NUMBER_LSB", "EntryTerms"]

NUMBER_LSB = -12
"""Least bit of the numbers that become keys."""
NUMBER_BITS = 25
"""Bits of a signed number of one query head."""
_LENGTH_LEAST = 9
_LENGTH_BITS = 6


class EntryTerms(wiring.Component):
    """Four entries of a query head.

    Members
    -------
    i : In, four ENTRY. take : In, which of them count in `sum`.
    top : In, the head's. reciprocal, length : In, R and b of the head; probability : In. All go with `i`.
    sum : Out, sum of the terms, SUM_LATENCY cycles later.
    numbers : Out, NUMBER_LATENCY cycles later.
    """

    SUM_LATENCY = 5
    NUMBER_LATENCY = 6

    i: In(data.ArrayLayout(ENTRY, LANES))
    take: In(LANES)
    top: In(signed(FLOOR_BITS))
    reciprocal: In(RECIPROCAL_BITS)
    length: In(_LENGTH_BITS)
    probability: In(1)
    sum: Out(TERM_BITS + 2)
    numbers: Out(data.ArrayLayout(signed(NUMBER_BITS), LANES))

    def elaborate(self, platform: object) -> Module:
        """The lanes, and the tree over their terms."""
        m = Module()
        reciprocal = delay(m, self.reciprocal, 3)
        least_places = delay(m, self.length - _LENGTH_LEAST, 2)
        probability = delay(m, self.probability, self.NUMBER_LATENCY - 1)
        terms = []
        for lane in range(LANES):
            places, scale = self._term(m, self.i[lane])
            # Cycle 2: the term.
            term = wire(m, (places << scale)[:TERM_BITS])
            terms.append(register(m, Mux(delay(m, self.take[lane], 2), term, 0)))
            # Cycles 3, 4: multiply. Cycle 5: shift.
            product = delay(m, register(m, places) * reciprocal, 2)
            distance = delay(m, (least_places - scale)[:_LENGTH_BITS], 3)
            share, _ = shift_right(m, product, distance[:-1])
            share = Mux(distance[-1], 0, share[: NUMBER_BITS - 1])
            logit = Cat(C(0, NUMBER_BITS - 1 - MAX_LOGIT_BITS), delay(m, self.i[lane].x_max, 5))
            number = register(m, Mux(probability, share, Cat(logit, logit[-1])))
            m.d.comb += self.numbers[lane].eq(number.as_signed())
        pairs = [register(m, terms[0] + terms[1]), register(m, terms[2] + terms[3])]
        m.d.comb += self.sum.eq(register(m, pairs[0] + pairs[1]))
        return m

    def _term(self, m: Module, entry: data.View) -> tuple[Value, Value]:
        """m and e of a term, in cycle 2."""
        # Cycle 0: distance to the head's maximum. Cycle 1: what goes below the mass's least bit.
        below = wire(m, self.top - (entry.x_max >> FRACTION_BITS))
        none, distance = register(m, below[5:].any()), register(m, below[:5])
        far = distance[4]
        shifted, _ = shift_right(m, register(m, entry.mass), Mux(far, distance[:4], 0))
        places = register(m, Mux(none, 0, shifted))
        scale = register(m, Mux(far, 0, MASS_BITS - distance[:4])[:5])
        return places, scale
