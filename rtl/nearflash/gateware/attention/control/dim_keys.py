"""Keys of channels: order(fp16(sum over the heads of |q[c]| · 2^-3)), RNE.

Contract: for every row of channels of a KEYS walk one KeyRow.

Timing: the sums of a row are converted one a cycle while the next row is summed; back-pressure: none.
Numerics: the sum is exact; one rounding. Equals nearflash.model.attention.control.scan.top_dims' keys.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.hdl import unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.control.dim_selector import KeyRow
from nearflash.gateware.attention.control.query import LANES, MAGNITUDE_BITS, MAGNITUDE_LSB, QueryRow
from nearflash.gateware.attention.numerics.fp16 import ToFp16, order_key
from nearflash.gateware.fp.pipeline import delay

__all__ = ["DimKeys"]

_HEADS_LOG2 = 3
_SUM_BITS = MAGNITUDE_BITS + _HEADS_LOG2


class DimKeys(wiring.Component):
    """Rows of q to rows of keys.

    Members
    -------
    i : In, QueryRow of a KEYS walk.
    o : Out, KeyRow. o_valid : Out.
    """

    i: In(QueryRow)
    o: Out(KeyRow)
    o_valid: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Sum, shift out, convert, collect."""
        m = Module()
        m.submodules.convert = convert = ToFp16(unsigned(_SUM_BITS), MAGNITUDE_LSB - _HEADS_LOG2)
        lanes = data.ArrayLayout(_SUM_BITS, LANES)
        sums, waiting, count = Signal(lanes), Signal(lanes), Signal(range(LANES + 1))
        complete, end, waiting_end = Signal(), Signal(), Signal()
        m.d.sync += [complete.eq(self.i.valid & self.i.last), end.eq(self.i.end)]
        for total, magnitude in zip(sums, self.i.magnitudes, strict=True):
            with m.If(self.i.valid):
                m.d.sync += total.eq(Mux(self.i.slot == 0, 0, total) + Mux(self.i.real, magnitude, 0))

        with m.If(complete):
            m.d.sync += [waiting.eq(sums), count.eq(LANES), waiting_end.eq(end)]
        with m.Elif(count != 0):
            m.d.sync += [waiting.eq(waiting.as_value() >> _SUM_BITS), count.eq(count - 1)]

        m.d.comb += convert.i.eq(waiting[0])
        valid, last, last_row = (
            delay(m, value, convert.LATENCY) for value in (count != 0, count == 1, (count == 1) & waiting_end)
        )
        keys = Signal(data.ArrayLayout(16, LANES))
        with m.If(valid):
            m.d.sync += keys.eq(Cat(keys.as_value()[16:], order_key(convert.o)))
        m.d.sync += [self.o_valid.eq(valid & last), self.o.last.eq(last_row)]
        m.d.comb += self.o.keys.eq(keys)
        return m
