"""Index check: whether the indices of a tile ascend and lie below a limit.

Contract: `begin` starts a tile; each word with `enable` holds the next four indices, 16 bits each, the last word may
hold fewer. Reset is not needed.

Timing: `unordered` and `beyond` count a word LATENCY cycle later; a word a cycle; back-pressure: none.
"""

from amaranth import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.topk import TILE_BITS
from nearflash.gateware.coding.kept_net import keep_net
from nearflash.gateware.fp.pipeline import select_digit

__all__ = ["IndexCheck"]


class IndexCheck(wiring.Component):
    """Compares each index with the one before it, and the last one with the limit.

    Members
    -------
    begin : In. enable, word : In. there : In, which of the word's indices there are, the low ones.
    stop : In, one beyond the indices that a short tile has, 0 for a whole one; stands while the outputs are looked at.
    unordered : Out, an index was not greater than the one before it.
    beyond : Out, the last index so far is not in the tile: where they ascend, some index is not.
    """

    #: Cycles from a word to the outputs.
    LATENCY = 1

    begin: In(1)
    enable: In(1)
    word: In(64)
    there: In(4)
    stop: In(TILE_BITS)
    unordered: Out(1)
    beyond: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Wrong orders of the indices that are there."""
        m = Module()
        before = Signal(16, reset_less=True)
        some = Signal(reset_less=True)
        unordered = Signal(reset_less=True)
        indices = [self.word.word_select(k, 16) for k in range(4)]
        there, wrong = self.there, Signal(4)
        short = (self.stop != 0) & (before[:TILE_BITS] >= self.stop)
        m.d.comb += [
            wrong.eq(Cat(now <= then for now, then in zip(indices, [before, *indices], strict=False))),
            self.beyond.eq(before[TILE_BITS:].any() | short),
            self.unordered.eq(unordered),
        ]
        newest = select_digit(keep_net(m, Cat(there[3] | (there[1] & ~there[2]), there[2])), indices)
        with m.If(self.enable):
            m.d.sync += [
                some.eq(1),
                before.eq(newest),
                unordered.eq(unordered | (wrong & there & Cat(some, 1, 1, 1)).any()),
            ]
        with m.If(self.begin):
            m.d.sync += [before.eq(0), some.eq(0), unordered.eq(0)]
        return m
