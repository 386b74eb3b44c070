"""Gearbox: wide beats to narrow groups (`Narrow`) and back (`Widen`), lowest bits first.

A beat holds `ratio` groups; group 0 sits in the least significant bits. Both directions move one group a cycle, without
a bubble between beats or between back-to-back transfers, while neither side stalls. Data are plain bit vectors: a beat
connects to a bus, a group to any struct of its width.
"""

from typing import Any

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Narrow", "Widen", "pieces"]


def pieces(count: Any, each: int) -> Any:
    """ceil(count / each) for a power of two: beats of `count` groups, groups of `count` elements."""
    return (count + (each - 1)) >> (each.bit_length() - 1)


def _check(width_bits: int, ratio: int) -> None:
    if width_bits < 1:
        raise ValueError(f"width_bits must be at least 1, not {width_bits!r}")
    if ratio < 2:
        raise ValueError(f"ratio must be at least 2 groups, not {ratio!r}")


class Narrow(wiring.Component):
    """Turn transfers of beats into exactly `i_count` groups each.

    A transfer of n groups takes ceil(n / ratio) beats; the groups of its final beat past the n-th are dropped, and the
    next transfer begins with a fresh beat. `o.payload.last` marks the n-th group. A count of 0 gives nothing. A count
    is taken when no transfer is in flight, or with the last group of the one before. Reset drops a transfer that has
    begun.

    Timing: latency LATENCY cycle from i to o when the count came a cycle before; one group a cycle; back-pressure: yes.
    o comes from registers; i.ready and i_count.ready depend on o.ready.

    Parameters
    ----------
    width_bits : bits of one group.
    ratio : groups in a beat, at least 2.
    count_width : bits of a group count.

    Members
    -------
    i_count : In stream of unsigned(count_width), groups in the transfer.
    i : In stream of unsigned(width_bits * ratio).
    o : Out stream of struct {data: width_bits, last: 1}.

    Raises
    ------
    ValueError : `width_bits` is less than 1 or `ratio` less than 2.
    """

    #: Cycles from a beat on `i` to its first group on `o`.
    LATENCY = 1

    def __init__(self, width_bits: int, ratio: int, *, count_width: int = 32) -> None:
        _check(width_bits, ratio)
        self.width_bits, self.ratio, self.count_width = width_bits, ratio, count_width
        super().__init__(
            {
                "i_count": In(stream.Signature(count_width)),
                "i": In(stream.Signature(width_bits * ratio)),
                "o": Out(stream.Signature(data.StructLayout({"data": width_bits, "last": 1}))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Pick group `slot` of the beat that waits on `i`: no beat register, one multiplexer."""
        m = Module()
        left = Signal(self.count_width)  # groups of the transfer, and below what it tells, from registers
        some, last = Signal(), Signal()
        slot = Signal(range(self.ratio))
        step = Signal()
        m.d.comb += [
            step.eq(some & self.i.valid & (self.o.ready | ~self.o.valid)),
            self.i_count.ready.eq(~some | (step & last)),
            self.i.ready.eq(step & (last | (slot == self.ratio - 1))),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(step):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o.payload.data.eq(self.i.payload.word_select(slot, self.width_bits)),
                self.o.payload.last.eq(last),
                left.eq(left - 1),
                some.eq(~last),
                last.eq(left == 2),
                slot.eq(Mux(self.i.ready, 0, slot + 1)),
            ]
        with m.If(self.i_count.ready & self.i_count.valid):
            count = self.i_count.payload
            m.d.sync += [left.eq(count), some.eq(count != 0), last.eq(count == 1)]
        return m


class Widen(wiring.Component):
    """Collect groups into beats; a group with `last` ends its beat early.

    Every group carries its own strobes (`strb_bits`, by default one per byte). In a beat that ended early the
    strobes of the missing groups are 0 and their data is whatever the slot held before. `o.payload.last` is the `last`
    of the final group. Reset drops a beat that is not complete.

    Timing: latency LATENCY cycle from a beat's final group to the beat; one group a cycle; back-pressure: yes. o comes
    from registers; i.ready depends on o.ready.

    Parameters
    ----------
    width_bits : bits of one group.
    ratio : groups in a beat, at least 2.
    strb_bits : strobe bits of one group; None: one per byte.

    Members
    -------
    i : In stream of struct {data: width_bits, strb: strb_bits, last: 1}.
    o : Out stream of struct {data: width_bits * ratio, strb: strb_bits * ratio, last: 1}.

    Raises
    ------
    ValueError : `width_bits` or `ratio` too small, or `width_bits` not a multiple of 8 when `strb_bits` is None.
    """

    #: Cycles from the final group of a beat on `i` to the beat on `o`.
    LATENCY = 1

    def __init__(self, width_bits: int, ratio: int, *, strb_bits: int | None = None) -> None:
        _check(width_bits, ratio)
        if strb_bits is None and width_bits % 8:
            raise ValueError(f"width_bits must be a multiple of 8 when strb_bits is None, not {width_bits!r}")
        self.width_bits, self.ratio = width_bits, ratio
        self.strb_bits = width_bits // 8 if strb_bits is None else strb_bits
        group = data.StructLayout({"data": width_bits, "strb": self.strb_bits, "last": 1})
        beat = data.StructLayout({"data": width_bits * ratio, "strb": self.strb_bits * ratio, "last": 1})
        super().__init__({"i": In(stream.Signature(group)), "o": Out(stream.Signature(beat))})

    def elaborate(self, platform: object) -> Module:
        """Write group after group into the beat register; the first one of a beat clears the other strobes."""
        m = Module()
        slot = Signal(range(self.ratio))
        push, end = Signal(), Signal()
        m.d.comb += [
            self.i.ready.eq(self.o.ready | ~self.o.valid),
            push.eq(self.i.valid & self.i.ready),
            end.eq(self.i.payload.last | (slot == self.ratio - 1)),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(push):
            m.d.sync += [
                self.o.valid.eq(end),
                self.o.payload.last.eq(self.i.payload.last),
                slot.eq(Mux(end, 0, slot + 1)),
            ]
            for index in range(self.ratio):
                strb = self.o.payload.strb.word_select(index, self.strb_bits)
                with m.If(slot == index):
                    m.d.sync += self.o.payload.data.word_select(index, self.width_bits).eq(self.i.payload.data)
                    m.d.sync += strb.eq(self.i.payload.strb)
                with m.Elif(slot == 0):
                    m.d.sync += strb.eq(0)
        return m
