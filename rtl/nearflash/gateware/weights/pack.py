"""Pack: groups of 16-bit lanes to words of a port, whole or their low bytes alone.

Contract: groups go to words in order, the first one lowest; with `narrow` a group is the low bytes of its lanes. What
goes in between two changes of `narrow` fills whole words. Reset drops a word that is not complete.

Timing: latency LATENCY cycle from a word's last group; one group a cycle; back-pressure: yes. o comes from registers;
i.ready depends on o.ready.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["LanePack"]


class LanePack(wiring.Component):
    """Collects groups.

    Parameters
    ----------
    width : lanes of a group, a power of two.
    port_bits : of a word, at least 16 · width.

    Members
    -------
    i : In stream of `width` lanes of 16 bits. narrow : In, lanes are bytes.
    o : Out stream of words.

    Raises
    ------
    ValueError : a group is wider than a word.
    """

    #: Cycles from a word's last group to the word.
    LATENCY = 1

    def __init__(self, width: int, port_bits: int) -> None:
        if 16 * width > port_bits:
            raise ValueError(f"port_bits must be at least {16 * width}, a group, not {port_bits!r}")
        self.width, self.port_bits = width, port_bits
        super().__init__(
            {
                "i": In(stream.Signature(16 * width)),
                "narrow": In(1),
                "o": Out(stream.Signature(port_bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Places of a word are half a group wide; a whole group takes two."""
        m = Module()
        place_bits = 8 * self.width
        place = Signal(range(self.port_bits // place_bits))
        step = Signal()
        low = Cat(self.i.payload.word_select(lane, 16)[:8] for lane in range(self.width))
        behind = place + Mux(self.narrow, 1, 2)
        m.d.comb += [self.i.ready.eq(self.o.ready | ~self.o.valid), step.eq(self.i.ready & self.i.valid)]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(step):
            m.d.sync += [place.eq(behind), self.o.valid.eq(behind == self.port_bits // place_bits)]
            for index in range(self.port_bits // place_bits):
                half = self.i.payload.word_select(index % 2, place_bits)
                with m.If(place == Mux(self.narrow, index, index // 2 * 2)):
                    m.d.sync += self.o.payload.word_select(index, place_bits).eq(Mux(self.narrow, low, half))
        return m
