"""Query writer: rows for the query memories, and each head's sums of |q|.

Contract: for every row of a pass of a WRITE walk one item on `query`, addresses ascending from `base`; lanes without a
head hold zeros. Behind a head's last row its sums leave on o_sum. The mask is what passed on i_mask since `begin`.

Timing: LATENCY cycles from the last slot of a row to `query`; back-pressure: none.
Numerics: sums are exact.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.control.query import LANES, MAGNITUDE_BITS, ROW_BITS, QueryRow
from nearflash.gateware.attention.engine.interfaces import HEAD_BITS, MaskBeat, query_write
from nearflash.gateware.attention.numerics.product import fp16_operand
from nearflash.gateware.fp.pipeline import register

__all__ = ["SUM_BITS", "MagnitudeSums", "QueryWriter"]

SUM_BITS = MAGNITUDE_BITS + 8
"""Width of a sum over the channels of one head."""
_HEADS = 8


class MagnitudeSums(data.Struct):
    """Sums of |q| of one head over all channels and over the selected ones, in units of 2^MAGNITUDE_LSB."""

    head: HEAD_BITS
    every: SUM_BITS
    chosen: SUM_BITS


class QueryWriter(wiring.Component):
    """Rows of q to the query memories.

    Parameters
    ----------
    heads_per_beat : heads of a query row, G.

    Members
    -------
    begin : In, before a head group's mask. base : In, address of its first row, from `begin` of the walk on.
    mask_valid, mask : In, MaskBeat that moves in this cycle. dense : In, no channel counts as selected.
    i : In, QueryRow of a WRITE walk.
    query_valid, query : Out, query_write(heads_per_beat).
    o_valid, o : Out, HeadSums.
    """

    #: Cycles from a row's last slot to `query`.
    LATENCY = 1

    def __init__(self, heads_per_beat: int) -> None:
        self.heads_per_beat = heads_per_beat
        super().__init__(
            {
                "begin": In(1),
                "base": In(12),
                "mask_valid": In(1),
                "mask": In(MaskBeat),
                "dense": In(1),
                "i": In(QueryRow),
                "query_valid": Out(1),
                "query": Out(query_write(heads_per_beat)),
                "o_valid": Out(1),
                "o": Out(MagnitudeSums),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The mask's row is looked up as the row of q comes; rows and sums go their own ways from there."""
        m = Module()
        m.submodules.masks = masks = Memory(shape=LANES, depth=1 << ROW_BITS, init=[])
        write, read = masks.write_port(), masks.read_port(domain="comb")
        written, selected = Signal(ROW_BITS), Signal(LANES)
        with m.If(self.begin):
            m.d.sync += written.eq(0)
        with m.Elif(self.mask_valid):
            m.d.sync += written.eq(written + 1)
        m.d.comb += [
            write.addr.eq(written),
            write.data.eq(self.mask.mask),
            write.en.eq(self.mask_valid),
            read.addr.eq(self.i.row),
            selected.eq(Mux(self.dense, 0, read.data)),
        ]

        # Rows.
        count = Signal(12)
        m.d.sync += self.query_valid.eq(self.i.valid & self.i.last)
        with m.If(self.begin):
            m.d.sync += count.eq(0)
        with m.Elif(self.query_valid):
            m.d.sync += count.eq(count + 1)
        # Counted as rows leave, so that the address stands beside its row.
        m.d.comb += self.query.address.eq(self.base + count)
        operands = [fp16_operand(m, value) for value in self.i["values"]]
        with m.If(self.i.valid):
            m.d.sync += self.query.selected.eq(selected)
            for lane, values in enumerate(self.query["values"]):
                with m.If(self.i.slot == lane):
                    m.d.sync += [value.eq(one) for value, one in zip(values, operands, strict=True)]
                # A new row: lanes that no head of the group fills must not keep old values.
                with m.Elif(self.i.slot == 0):
                    m.d.sync += values.eq(0)
        self._sum(m, selected)
        return m

    def _sum(self, m: Module, selected: Signal) -> None:
        """Cycle 0: sums of two channels each. Cycle 1: add them to those of their head."""
        magnitudes = list(self.i.magnitudes)
        wanted = [Mux(bit, value, 0) for bit, value in zip(selected, magnitudes, strict=True)]
        every, chosen = (
            [register(m, values[k] + values[k + 1]) for k in range(0, LANES, 2)] for values in (magnitudes, wanted)
        )
        valid, head, first, end = (
            register(m, value) for value in (self.i.valid, self.i.head, self.i.row == 0, self.i.end)
        )
        m.submodules.sums = sums = Memory(shape=2 * SUM_BITS, depth=_HEADS, init=[])
        write, read = sums.write_port(), sums.read_port(domain="comb")
        # The first row of a head starts over: sums of the head before are still there.
        before = [Mux(first, 0, read.data[k * SUM_BITS :][:SUM_BITS]) for k in range(2)]
        after = Signal(MagnitudeSums)
        m.d.comb += [
            read.addr.eq(head),
            write.addr.eq(head),
            write.en.eq(valid),
            write.data.eq(Cat(after.every, after.chosen)),
            # The narrow sum first: the wide adder is a DSP slice, and two of them in a row are slow.
            after.every.eq(before[0] + sum(every)),
            after.chosen.eq(before[1] + sum(chosen)),
            after.head.eq(head),
        ]
        m.d.sync += [self.o_valid.eq(valid & end), self.o.eq(after)]
