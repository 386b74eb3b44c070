"""EntryKeys: sums numbers over the query heads and gives the entries' keys.

Timing: latency LATENCY cycles from the last head's numbers to the keys; four numbers a cycle, free-running.
Numerics: fp16 of the exact sum, rounded to nearest even, then order; equals nearflash.model.attention.select.selection
(`logit_keys`, `probability_keys`).
"""

from amaranth import Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.numerics.fp16 import ToFp16, order_key
from nearflash.gateware.attention.select.keystore import LANES
from nearflash.gateware.attention.select.terms import NUMBER_BITS, NUMBER_LSB

__all__ = ["EntryKeys"]

_SUM = signed(NUMBER_BITS + 3)


class EntryKeys(wiring.Component):
    """Four entries side by side.

    Members
    -------
    numbers : In, of one head. first : In, of the first head.
    o : Out, keys, LATENCY cycles after the last head's numbers.
    """

    numbers: In(data.ArrayLayout(signed(NUMBER_BITS), LANES))
    first: In(1)
    o: Out(data.ArrayLayout(16, LANES))

    def __init__(self) -> None:
        self._convert = [ToFp16(_SUM, NUMBER_LSB) for _ in range(LANES)]
        #: Cycles from `numbers` to `o`.
        self.LATENCY = 1 + self._convert[0].LATENCY
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        """Running sums, converted in every cycle."""
        m = Module()
        for lane, convert in enumerate(self._convert):
            m.submodules[f"convert_{lane}"] = convert
            total = Signal(_SUM, reset_less=True)
            m.d.sync += total.eq(Mux(self.first, 0, total) + self.numbers[lane])
            m.d.comb += [convert.i.eq(total), self.o[lane].eq(order_key(convert.o))]
        return m
