"""Gearbox for groups of one of several widths: wide beats to narrow groups (`SizedNarrow`) and back (`SizedWiden`).

As nearflash.gateware.stream.gearbox, lowest bits first, but groups are whole, a half, ... or 1 / 2^halvings of the
widest, as `halved` says for a transfer, and a transfer may begin inside a beat, at place `first`, counted in groups of
the smallest width. Both must stay as they are while a transfer is in flight; a group lies at a multiple of its width.
The data of a narrower group are its lowest bits; what stands above them is not defined.
"""

from typing import Any

from amaranth import Array, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["SizedNarrow", "SizedWiden"]


def _check(width_bits: int, ratio: int, halvings: int, least_bits: int) -> None:
    if ratio < 2 or ratio.bit_count() != 1:
        raise ValueError(f"ratio must be a power of two of at least 2 groups, not {ratio!r}")
    if halvings < 0:
        raise ValueError(f"halvings must be at least 0, not {halvings!r}")
    if width_bits < 1 or width_bits % (least_bits << halvings):
        raise ValueError(f"width_bits must be a multiple of {least_bits << halvings}, not {width_bits!r}")


def _size(ratio: int, halvings: int) -> dict[str, wiring.Member]:
    return {"first": In(range(ratio << halvings)), **({"halved": In(range(halvings + 1))} if halvings else {})}


def _places(component: Any) -> Any:
    """Places of the smallest width that a group takes."""
    if not component.halvings:
        return 1
    return Array(1 << component.halvings - halved for halved in range(component.halvings + 1))[component.halved]


class SizedNarrow(wiring.Component):
    """Turn transfers of beats into exactly `i_count` groups each.

    Places of a transfer's first beat before `first` and of its final one past its last group are dropped.
    `o.payload.last` marks the last group. A count of 0 gives nothing. A count is taken when no transfer is in flight,
    or with the last group of the one before. Reset drops a transfer that has begun.

    Timing: latency LATENCY cycle from i to o when the count came a cycle before; one group a cycle; back-pressure: yes.
    o comes from registers; i.ready and i_count.ready depend on o.ready.

    Parameters
    ----------
    width_bits : bits of the widest group.
    ratio : widest groups in a beat, a power of two of at least 2.
    halvings : how often `width_bits` may be halved.
    count_width : bits of a group count.

    Members
    -------
    first : In, place of the first group. halved : In, how often the groups are halved; only where `halvings` is not 0.
    i_count : In stream of unsigned(count_width), groups in the transfer.
    i : In stream of unsigned(width_bits * ratio).
    o : Out stream of struct {data: width_bits, last: 1}.

    Raises
    ------
    ValueError : a parameter outside its range.
    """

    #: Cycles from a beat on `i` to its first group on `o`.
    LATENCY = 1

    def __init__(self, width_bits: int, ratio: int, *, halvings: int = 0, count_width: int = 32) -> None:
        _check(width_bits, ratio, halvings, 1)
        self.width_bits, self.ratio, self.halvings, self.count_width = width_bits, ratio, halvings, count_width
        super().__init__(
            {
                **_size(ratio, halvings),
                "i_count": In(stream.Signature(count_width)),
                "i": In(stream.Signature(width_bits * ratio)),
                "o": Out(stream.Signature(data.StructLayout({"data": width_bits, "last": 1}))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Select a group's parts: the lowest from any place, those that only wider groups have from fewer."""
        m = Module()
        left = Signal(self.count_width)  # groups of the transfer, and below what it tells, from registers
        some, last = Signal(), Signal()
        slot, step = Signal(range(self.ratio << self.halvings)), Signal()
        behind = Signal(len(slot) + 1)
        m.d.comb += [
            behind.eq(slot + _places(self)),
            step.eq(some & self.i.valid & (self.o.ready | ~self.o.valid)),
            self.i_count.ready.eq(~some | (step & last)),
            self.i.ready.eq(step & (last | behind[-1])),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(step):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o.payload.data.eq(self._group(slot)),
                self.o.payload.last.eq(last),
                left.eq(left - 1),
                some.eq(~last),
                last.eq(left == 2),
                slot.eq(behind),
            ]
        with m.If(self.i_count.ready & self.i_count.valid):
            count = self.i_count.payload
            m.d.sync += [left.eq(count), some.eq(count != 0), last.eq(count == 1), slot.eq(self.first)]
        return m

    def _group(self, slot: Signal) -> Cat:
        parts = [self.i.payload.word_select(slot, self.width_bits >> self.halvings)]
        for halved in reversed(range(self.halvings)):
            wide = self.i.payload.word_select(slot[self.halvings - halved :], self.width_bits >> halved)
            parts.append(wide[len(wide) // 2 :])
        return Cat(parts)


class SizedWiden(wiring.Component):
    """Collect groups into beats; a group with `last` ends its beat early, and the transfer.

    Every group carries its own strobes, one per byte. Strobes of places without a group are 0 and their data is
    whatever was there before. `o.payload.last` is the `last` of the final group. Reset drops a beat that is not
    complete; the next group begins a transfer.

    Timing: latency LATENCY cycle from a beat's final group to the beat; one group a cycle; back-pressure: yes. o comes
    from registers; i.ready depends on o.ready.

    Parameters
    ----------
    width_bits : bits of the widest group, a multiple of 8 when halved `halvings` times.
    ratio : widest groups in a beat, a power of two of at least 2.
    halvings : how often `width_bits` may be halved.

    Members
    -------
    first : In, place of the first group. halved : In, how often the groups are halved; only where `halvings` is not 0.
    i : In stream of struct {data: width_bits, strb: width_bits / 8, last: 1}.
    o : Out stream of struct {data: width_bits * ratio, strb: width_bits / 8 * ratio, last: 1}.

    Raises
    ------
    ValueError : a parameter outside its range.
    """

    #: Cycles from the final group of a beat on `i` to the beat on `o`.
    LATENCY = 1

    def __init__(self, width_bits: int, ratio: int, *, halvings: int = 0) -> None:
        _check(width_bits, ratio, halvings, 8)
        self.width_bits, self.ratio, self.halvings = width_bits, ratio, halvings
        group = data.StructLayout({"data": width_bits, "strb": width_bits // 8, "last": 1})
        beat = data.StructLayout({"data": width_bits * ratio, "strb": width_bits // 8 * ratio, "last": 1})
        super().__init__({**_size(ratio, halvings), "i": In(stream.Signature(group)), "o": Out(stream.Signature(beat))})

    def elaborate(self, platform: object) -> Module:
        """Write group after group into the beat register; the first one of a beat clears the other strobes."""
        m = Module()
        width = self.width_bits >> self.halvings
        slot, place = (Signal(range(self.ratio << self.halvings), name=name) for name in ("slot", "place"))
        inside = Signal()  # a transfer
        behind = Signal(len(slot) + 1)
        push, begins, end = Signal(), Signal(), Signal()
        m.d.comb += [
            place.eq(Mux(inside, slot, self.first)),
            begins.eq(~inside | (slot == 0)),
            behind.eq(place + _places(self)),
            self.i.ready.eq(self.o.ready | ~self.o.valid),
            push.eq(self.i.valid & self.i.ready),
            end.eq(self.i.payload.last | behind[-1]),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(push):
            m.d.sync += [
                self.o.valid.eq(end),
                self.o.payload.last.eq(self.i.payload.last),
                slot.eq(behind),
                inside.eq(~self.i.payload.last),
            ]
            for index in range(self.ratio << self.halvings):
                part, here = self._part(index, place)
                strb = self.o.payload.strb.word_select(index, width // 8)
                with m.If(here):
                    m.d.sync += self.o.payload.data.word_select(index, width).eq(
                        Array(self.i.payload.data.word_select(n, width) for n in range(1 << self.halvings))[part]
                    )
                    m.d.sync += strb.eq(
                        Array(self.i.payload.strb.word_select(n, width // 8) for n in range(1 << self.halvings))[part]
                    )
                with m.Elif(begins):
                    m.d.sync += strb.eq(0)
        return m

    def _part(self, index: int, place: Signal) -> tuple[Any, Any]:
        """Which part of the group place `index` takes, and whether the group covers it."""
        if not self.halvings:
            return 0, place == index
        sizes = [self.halvings - halved for halved in range(self.halvings + 1)]  # log2 of the places of a group
        part = Array(index % (1 << size) for size in sizes)[self.halved]
        here = Array(place[size:] == index >> size for size in sizes)[self.halved]
        return part, here
