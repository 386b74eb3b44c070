"""Bitmap of a block that states none: each of its elements has a value.

Contract: a count of n elements gives ceil(n / 32) · 32 / W beats, in which the first n bits are ones: as many as the
dense block has, padded to 64 bytes. A count of 0 gives nothing. Reset drops a count that has begun.

Timing: latency LATENCY cycle; one beat a cycle; back-pressure: yes. o comes from registers but for a compare.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SECTION_BYTES
from nearflash.gateware.stream.gearbox import pieces

__all__ = ["FullBitmap"]

_BLOCK_ELEMENTS = SECTION_BYTES // 2


class FullBitmap(wiring.Component):
    """Makes ones.

    Parameters
    ----------
    width : bits of a beat (W), a power of two up to 32.
    elements_max : largest count.

    Members
    -------
    i_count : In stream of range(elements_max + 1).
    o : Out stream of struct {bits: W, last: 1}.
    """

    #: Cycles from a count to its first beat.
    LATENCY = 1

    def __init__(self, width: int, elements_max: int) -> None:
        self.width, self.elements_max = width, elements_max
        super().__init__(
            {
                "i_count": In(stream.Signature(range(elements_max + 1))),
                "o": Out(stream.Signature(data.StructLayout({"bits": width, "last": 1}))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Count elements and beats down."""
        m = Module()
        count, width = self.i_count.payload, self.width
        left = Signal.like(count)
        beats = Signal(range(pieces(self.elements_max, _BLOCK_ELEMENTS) * (_BLOCK_ELEMENTS // width) + 1))
        step = Signal()
        m.d.comb += [
            self.o.payload.bits.eq(Cat(left > lane for lane in range(width))),
            self.o.payload.last.eq(beats == 1),
            self.o.valid.eq(beats != 0),
            step.eq(self.o.valid & self.o.ready),
            self.i_count.ready.eq(~self.o.valid | (step & self.o.payload.last)),
        ]
        with m.If(step):
            m.d.sync += [left.eq(Mux(left > width, left - width, 0)), beats.eq(beats - 1)]
        with m.If(self.i_count.valid & self.i_count.ready):
            m.d.sync += [left.eq(count), beats.eq(pieces(count, _BLOCK_ELEMENTS) * (_BLOCK_ELEMENTS // width))]
        return m
