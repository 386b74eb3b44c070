"""Unpack: words of a port to groups of fields, each field in a lane of its own.

Contract: a count of n fields takes the words that they fill, and gives the groups that they fill; lanes past the n-th
field are zero in the final group, which has `last`. The next count begins with a fresh word. A count of 0 gives
nothing. `size` stands from a count until its last group. Reset drops what is inside.

Timing: latency LATENCY cycle from a word when the count came a cycle before; one group a cycle; back-pressure: yes. o
comes from registers; i.ready and i_count.ready depend on o.ready.
"""

from collections.abc import Sequence

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["FieldUnpack"]


class FieldUnpack(wiring.Component):
    """A gearbox with a choice of field sizes.

    Parameters
    ----------
    width : fields of a group, a power of two.
    port_bits : of a word.
    sizes_bits : sizes of fields, powers of two.
    lane_bits : of a lane, at least the largest of them.
    count_bits : of a count.

    Members
    -------
    i_count : In stream of unsigned(count_bits), fields.
    i : In stream of words, the first field lowest.
    size : In, index in `sizes_bits`.
    o : Out stream of struct {data: `width` lanes, last: 1}, each field zero extended to its lane.

    Raises
    ------
    ValueError : a group of the largest fields is wider than a word.
    """

    #: Cycles from a word to its first group.
    LATENCY = 1

    def __init__(
        self, width: int, port_bits: int, sizes_bits: Sequence[int], *, lane_bits: int, count_bits: int
    ) -> None:
        if width * max(sizes_bits) > port_bits:
            raise ValueError(f"port_bits must be at least {width * max(sizes_bits)}, a group, not {port_bits!r}")
        self.width, self.port_bits, self.sizes_bits, self.lane_bits = width, port_bits, tuple(sizes_bits), lane_bits
        super().__init__(
            {
                "i_count": In(stream.Signature(count_bits)),
                "i": In(stream.Signature(port_bits)),
                "size": In(range(max(2, len(sizes_bits)))),
                "o": Out(stream.Signature(data.StructLayout({"data": width * lane_bits, "last": 1}))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Pick group `slot` of the word that waits on `i`."""
        m = Module()
        slots = self.port_bits // (self.width * min(self.sizes_bits))
        left = Signal(self.i_count.payload.shape())  # fields that are still to come
        slot = Signal(range(max(2, slots)))
        some = Signal()  # of a count, groups are still to come
        last = Signal()
        word_ends, step = Signal(), Signal()
        chosen = Signal(self.width * self.lane_bits)
        with m.Switch(self.size):
            for index, bits in enumerate(self.sizes_bits):
                groups = self.port_bits // (self.width * bits)
                group = self.i.payload.word_select(slot[: (groups - 1).bit_length()], self.width * bits)
                with m.Case(index):
                    m.d.comb += word_ends.eq(slot == groups - 1)
                    for lane in range(self.width):
                        field = group.word_select(lane, bits)
                        m.d.comb += chosen.word_select(lane, self.lane_bits).eq(Mux(left > lane, field, 0))
        m.d.comb += [
            step.eq(some & self.i.valid & (self.o.ready | ~self.o.valid)),
            self.i_count.ready.eq(~some | (step & last)),
            self.i.ready.eq(step & (last | word_ends)),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(step):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o.payload.data.eq(chosen),
                self.o.payload.last.eq(last),
                left.eq(left - self.width),
                some.eq(~last),
                last.eq(left <= 2 * self.width),
                slot.eq(Mux(self.i.ready, 0, slot + 1)),
            ]
        with m.If(self.i_count.ready & self.i_count.valid):
            count = self.i_count.payload
            m.d.sync += [left.eq(count), some.eq(count != 0), last.eq(count <= self.width)]
        return m
