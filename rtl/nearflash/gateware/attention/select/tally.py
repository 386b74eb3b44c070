"""Tally: histograms of four keys a cycle, one table a lane, and the sums over the lanes, bin by bin.

Timing: latency LATENCY cycles from `digit` to `o`; four additions or one scanned bin a cycle, free-running.
Limits: tables are not reset: scan all bins first.
"""

from collections.abc import Mapping

from amaranth import Module, Mux
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.select.histogram import Histogram
from nearflash.gateware.attention.select.keystore import LANES
from nearflash.gateware.fp.pipeline import register

__all__ = ["Tally"]


class Tally(wiring.Component):
    """Sums of 2^digit_bits bins.

    Parameters: digit_bits; sums, widths of a bin's sums over all lanes, by name, of which no lane may have more than a
    LANES-th of 2^width; amounts, of what is added.

    Members
    -------
    add : In, by lane: add amount[lane] to the sums of bin[lane].
    scan : In, instead: give bin `digit` and clear it.
    o : Out, by name, that bin's sums, LATENCY cycles later.
    """

    #: Cycles from `digit` to `o`.
    LATENCY = Histogram.LATENCY + 2

    def __init__(self, digit_bits: int, sums: Mapping[str, int], amounts: Mapping[str, int]) -> None:
        self._sums, self._amounts = sums, amounts
        super().__init__(
            {
                "bin": In(digit_bits).array(LANES),
                "amount": In(data.StructLayout(amounts)).array(LANES),
                "add": In(LANES),
                "scan": In(1),
                "digit": In(digit_bits),
                "o": Out(data.StructLayout(sums)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Tables, then a tree of two stages."""
        m = Module()
        found = []
        sums = {name: width - LANES.bit_length() + 1 for name, width in self._sums.items()}
        for lane in range(LANES):
            table = m.submodules[f"table_{lane}"] = Histogram(len(self.digit), sums, self._amounts)
            m.d.comb += [
                table.bin.eq(Mux(self.scan, self.digit, self.bin[lane])),
                table.amount.eq(self.amount[lane]),
                table.add.eq(self.add[lane] & ~self.scan),
                table.clear.eq(self.scan),
            ]
            found.append(table.o)
        for name in self._sums:
            pairs = [register(m, found[k][name] + found[k + 1][name]) for k in (0, 2)]
            m.d.comb += self.o[name].eq(register(m, pairs[0] + pairs[1]))
        return m
