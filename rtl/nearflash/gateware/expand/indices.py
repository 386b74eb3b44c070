"""Index check: whether the indices of a tile ascend and lie below a limit.

Contract: `begin` starts a tile of `count` indices; each word with `enable` holds the next four of them, 16 bits each,
the last word perhaps fewer. Reset is not needed.

Timing: `unordered` and `beyond` count a word LATENCY cycle later; a word a cycle; back-pressure: none.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.topk import TILE_BITS

__all__ = ["COUNT_BITS", "IndexCheck"]

COUNT_BITS = TILE_BITS + 1
"""Of the pairs in a tile."""


class IndexCheck(wiring.Component):
    """Compares each index with the one before it, and the last one with the limit.

    Members
    -------
    begin, count : In. enable, word : In. limit : In, stands while the outputs are looked at.
    unordered : Out, an index was not greater than the one before it.
    beyond : Out, the last index so far is not below `limit`: where they ascend, some index is not.
    """

    #: Cycles from a word to the outputs.
    LATENCY = 1

    begin: In(1)
    count: In(COUNT_BITS)
    enable: In(1)
    word: In(64)
    limit: In(COUNT_BITS)
    unordered: Out(1)
    beyond: Out(1)

    def elaborate(self, platform: object) -> Module:
        """A flag for each index that it is there; wrong orders of those that are."""
        m = Module()
        left = Signal(COUNT_BITS, reset_less=True)
        before = Signal(16, reset_less=True)
        some = Signal(reset_less=True)
        unordered = Signal(reset_less=True)
        indices = [self.word.word_select(k, 16) for k in range(4)]
        there = Signal(4)
        wrong = Signal(4)
        m.d.comb += [
            there.eq(Cat(left > k for k in range(4))),
            wrong.eq(Cat(now <= then for now, then in zip(indices, [before, *indices], strict=False))),
            self.beyond.eq(before >= self.limit),
            self.unordered.eq(unordered),
        ]
        with m.If(self.enable):
            m.d.sync += [
                left.eq(left - 4),
                some.eq(1),
                before.eq(Mux(there[3], indices[3], Mux(there[2], indices[2], Mux(there[1], indices[1], indices[0])))),
                unordered.eq(unordered | (wrong & there & Cat(some, 1, 1, 1)).any()),
            ]
        with m.If(self.begin):
            m.d.sync += [left.eq(self.count), before.eq(0), some.eq(0), unordered.eq(0)]
        return m
