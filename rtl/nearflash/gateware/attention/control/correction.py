"""Factor from approximate score to logit of one query head: scale · sqrt(A / B).

A is the sum of |q| over all channels, B over the selected ones. Where B is zero the factor is `scale`.

Timing: latency LATENCY cycles, a head every 2 cycles, at most 8 heads waiting; back-pressure: none on o.
Numerics: A, B exact, then fl32(scale · fl32(sqrt(fl32(fl32(A) / fl32(B))))), all RNE (docs/contracts/attention.md,
"Logit").
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.hdl import unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.gateware.attention.control.query import MAGNITUDE_LSB
from nearflash.gateware.attention.control.rows import SUM_BITS, MagnitudeSums
from nearflash.gateware.attention.engine.interfaces import HEAD_BITS
from nearflash.gateware.attention.numerics.raw import ToRaw
from nearflash.gateware.fp.div import Div
from nearflash.gateware.fp.mul import Mul
from nearflash.gateware.fp.pipeline import delay
from nearflash.gateware.fp.raw import RAW, Pack
from nearflash.gateware.fp.sqrt import Sqrt
from nearflash.gateware.stream.datapath import Datapath, Timed
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["HeadScale", "ScaleCorrection"]

_HEADS = 8


class HeadScale(data.Struct):
    """Factor of one query head, fp32 bits."""

    head: HEAD_BITS
    scale: 32


class ScaleCorrection(wiring.Component):
    """One pipeline for all query heads: B goes in first, A a cycle later.

    Members
    -------
    scale : In, fp32 bits of a positive normal number; holds still.
    i_valid, i : In, HeadSums; never more than 8 ahead of `o`.
    o_valid, o : Out, HeadScale.
    """

    def __init__(self) -> None:
        self._sum = ToRaw(unsigned(SUM_BITS), MAGNITUDE_LSB)
        self._div, self._sqrt, self._mul, self._pack = Div(), Sqrt(), Mul(), Pack()
        units = (self._sum, self._div, self._sqrt, self._mul, self._pack)
        #: Cycles from sums on `i` to `o` when no other head waits.
        self.LATENCY = sum(unit.LATENCY for unit in units) + StreamQueue.LATENCY["distributed"] + 1
        super().__init__(
            {
                "scale": In(FP32.bits),
                "i_valid": In(1),
                "i": In(MagnitudeSums),
                "o_valid": Out(1),
                "o": Out(HeadScale),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Divide, root, product; a zero B is told along the way."""
        m = Module()
        m.submodules.queue = queue = StreamQueue(MagnitudeSums, _HEADS)
        sums, second = queue.o.payload, Signal()
        # Two cycles an item: both sums go through one unit, first the chosen ones.
        m.d.comb += [queue.i.payload.eq(self.i), queue.i.valid.eq(self.i_valid), queue.o.ready.eq(second)]
        m.d.sync += second.eq(queue.o.valid & ~second)

        path = Datapath(m)
        scale, chosen = Signal(RAW), Signal(RAW)
        m.d.comb += [
            scale.sig.eq(Cat(self.scale[: FP32.mantissa_bits], 1)),
            scale.exp.eq(self.scale[FP32.mantissa_bits : -1] - FP32.bias),
        ]
        every = path.call("sum", self._sum, i=Timed(Mux(second, sums.every, sums.chosen), 0))
        m.d.sync += chosen.eq(every.value)
        ratio = path.call("div", self._div, a=every, b=Timed(chosen, every.cycle))
        root = path.call("sqrt", self._sqrt, a=ratio)
        product = path.call("mul", self._mul, a=root, b=scale)
        packed = path.call("pack", self._pack, i=product)
        # The quotient is then an infinity or a NaN: it is not used.
        empty = path.delay(Timed(chosen.zero, every.cycle), packed.cycle)
        m.d.comb += [
            self.o.scale.eq(Mux(empty, self.scale, packed.value)),
            self.o.head.eq(delay(m, sums.head, packed.cycle)),
            self.o_valid.eq(delay(m, second, packed.cycle)),
        ]
        return m
