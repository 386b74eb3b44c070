"""Sum of the channels' shares of a drained slot, item by item.

    i[0] ─┐   ┌───────┐
    i[1] ─┼──►│ + max │─┐   ┌───────┐
    i[2] ─┼──►│ + max │─┴──►│ + max │──► o
    i[3] ─┘   └───────┘     └───────┘

The upper half of every sum is one cycle behind the lower one.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import PV_BITS
from nearflash.gateware.attention.engine.interfaces import Partial
from nearflash.gateware.attention.numerics.carry import carry_add
from nearflash.gateware.fp.pipeline import register, wire

__all__ = ["PartialSum"]

_LOW = PV_BITS // 2


class PartialSum(wiring.Component):
    """Item n of `o` is the sum, and the largest maximum, of item n of every channel.

    Contract: while `take` is high, items leave all channels together, when all have one.

    Timing: latency LATENCY cycles, one item a cycle; o has no back-pressure: who raises `take` takes what comes.
    Numerics: exact; the sums must fit PV_BITS.

    Parameters
    ----------
    channels : inputs, at least 1.

    Members
    -------
    i : array of `channels` In streams of Partial.
    take : In.
    o : Out, Partial. o_valid : Out.

    Raises
    ------
    ValueError : `channels` is less than 1.
    """

    def __init__(self, channels: int) -> None:
        if channels < 1:
            raise ValueError(f"channels must be at least 1, not {channels!r}")
        self.channels = channels
        #: Cycles from the inputs to `o`.
        self.LATENCY = (channels - 1).bit_length() + 1
        super().__init__(
            {
                "i": In(stream.Signature(Partial)).array(channels),
                "take": In(1),
                "o": Out(Partial),
                "o_valid": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One register a level of the tree, and one to bring both halves together."""
        m = Module()
        # All channels at once: a sum of some of them would have to be kept.
        taken = wire(m, Cat(i.valid for i in self.i).all() & self.take)
        m.d.comb += [i.ready.eq(taken) for i in self.i]
        under_way = Signal(self.LATENCY)
        m.d.sync += under_way.eq(Cat(taken, under_way))

        low = [i.payload.sum[:_LOW] for i in self.i]
        # The upper half runs a cycle behind the lower one, whose carry it needs.
        high = [register(m, i.payload.sum[_LOW:].as_signed()) for i in self.i]
        maximum = [i.payload.maximum for i in self.i]
        while len(low) > 1:
            pairs = range(0, len(low) - 1, 2)
            sums = [register(m, carry_add(m, low[k], low[k + 1], 0)) for k in pairs]
            above = [
                register(m, carry_add(m, high[k], high[k + 1], one[_LOW])) for k, one in zip(pairs, sums, strict=True)
            ]
            larger = [register(m, Mux(maximum[k] > maximum[k + 1], maximum[k], maximum[k + 1])) for k in pairs]
            odd = len(low) % 2
            low = [one[:_LOW] for one in sums] + [register(m, one) for one in low[len(low) - odd :]]
            high = [one[: PV_BITS - _LOW].as_signed() for one in above] + [
                register(m, one) for one in high[len(high) - odd :]
            ]
            maximum = larger + [register(m, one) for one in maximum[len(maximum) - odd :]]
        m.d.comb += [
            self.o.sum.eq(Cat(register(m, low[0]), high[0])),
            self.o.maximum.eq(register(m, maximum[0])),
            self.o_valid.eq(under_way[-1]),
        ]
        return m
