"""Counter of a section's values or escapes: ones of a bitmap, codes of three, a word a cycle.

Contract: `begin` starts a section of `bits` bits, LATENCY cycles or more after the last word of the one before; behind
it, each word with `enable` holds the next of them. Bits past the last one do not count; `beyond` tells whether one is
set.

Timing: `count` and `beyond` have all words up to a word LATENCY cycles later; a word a cycle; back-pressure: none.
"""

from enum import IntEnum
from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import wire

__all__ = ["Counted", "Popcount"]

_CHUNK = 64
_SUMMANDS = 8


class Counted(IntEnum):
    """Unit of the count: ones, or fields of four or of two bits whose lowest two are set."""

    ONES = 0
    THREES_OF_4 = 1
    THREES_OF_2 = 2


class Popcount(wiring.Component):
    """Sums by eights, a level a cycle.

    Parameters
    ----------
    port_bits : of a word: 64 to 512.
    bits_max : of a section.

    Members
    -------
    begin, bits, counted : In. enable, word : In.
    count : Out. beyond : Out.
    """

    def __init__(self, port_bits: int, bits_max: int) -> None:
        self.port_bits, self.bits_max = port_bits, bits_max
        #: Cycles from a word to the outputs.
        self.LATENCY = self.latency(port_bits)
        super().__init__(
            {
                "begin": In(1),
                "bits": In(range(bits_max + 1)),
                "counted": In(Counted),
                "enable": In(1),
                "word": In(port_bits),
                "count": Out(range(bits_max + 1)),
                "beyond": Out(1),
            }
        )

    @staticmethod
    def latency(port_bits: int) -> int:
        """Cycles: the levels of the tree, and the sum over words."""
        return -(-(port_bits - 1).bit_length() // 3) + 1

    def elaborate(self, platform: object) -> Module:
        """Bits that are there; of codes, one bit for each of three; then the tree."""
        m = Module()
        there = self._there(m)
        ones = wire(m, self.word & there)
        pairs = wire(m, ones & (ones >> 1))
        places = [Mux(self.counted == Counted.THREES_OF_4, k % 4 == 0, k % 2 == 0) for k in range(4)]
        threes = pairs & Cat(places).replicate(self.port_bits // 4)
        chosen = wire(m, Mux(self.counted == Counted.ONES, ones, threes))

        summands: list[Any] = [bit & self.enable for bit in chosen]
        for level in range(1, self.LATENCY):
            sums = [sum(summands[k : k + _SUMMANDS]) for k in range(0, len(summands), _SUMMANDS)]
            most = min(_SUMMANDS**level, self.port_bits)
            summands = [Signal(range(most + 1), name=f"sum_{level}_{k}", reset_less=True) for k in range(len(sums))]
            m.d.sync += [register.eq(each) for register, each in zip(summands, sums, strict=True)]
        m.d.sync += self.count.eq(self.count + summands[0])
        with m.If(self.enable & (self.word & ~there).any()):
            m.d.sync += self.beyond.eq(1)
        with m.If(self.begin):
            m.d.sync += [self.count.eq(0), self.beyond.eq(0)]
        return m

    def _there(self, m: Module) -> Value:
        """Which bits of the word are of the section: registers say which chunks are, and which bits of the last one."""
        chunks = range(self.port_bits // _CHUNK)
        left = Signal(range(self.bits_max + 1))  # with the word that comes
        whole, last = Signal(len(chunks), name="whole"), Signal(len(chunks), name="last")
        tail = Signal(_CHUNK)
        behind = wire(m, Mux(self.begin, self.bits, Mux(left > self.port_bits, left - self.port_bits, 0)))
        with m.If(self.begin | self.enable):
            m.d.sync += [
                left.eq(behind),
                whole.eq(Cat(behind[6:] > k for k in chunks)),
                last.eq(Cat((behind[6:] == k) & behind[:6].any() for k in chunks)),
            ]
        with m.If(self.begin):
            m.d.sync += tail.eq(Cat(self.bits[:6] > k for k in range(_CHUNK)))
        return wire(m, Cat(whole[k].replicate(_CHUNK) | (tail & last[k].replicate(_CHUNK)) for k in chunks))
