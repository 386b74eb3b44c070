"""Bitmap expander: a bitmap and packed values to dense elements, W a cycle at every density.

    i_bitmap ─► counts ─┬──────────────► controls ─┐
    i_value ─► window of two words ─► funnel ─► scatter ─► o

Contract: a beat out for every beat of the bitmap, in order: its ones take the next values, its zeros are zero. A beat
with `last` ends a row; what is left of the word of values that it took from is dropped, so that each row's values begin
with a word. Words of values without a use wait. Reset drops what is inside.

Timing: latency LATENCY cycles from a beat of the bitmap, VALUE_LATENCY from a word of values where that comes later;
one beat a cycle while values come, and one cycle more for a row whose last beat takes from two words; back-pressure:
yes. o comes from registers.
Numerics: bits are moved as they are; equals nearflash.model.weights.bitmap.expand_row.
Source: Endor (arXiv 2406.11674) for the format; the scatter network is Warren's.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.weights.scatter import Level, funnel, prefix_counts, register, scatter, scatter_levels

__all__ = ["BitmapExpander"]


class BitmapExpander(wiring.Component):
    """Expands rows.

    Parameters
    ----------
    width : elements a beat (W), a power of two from 4 to 64.
    element_bits : 1, 2, 8 or 16.

    Members
    -------
    i_bitmap : In stream of struct {bits: W, last: 1}; bit k is element k.
    i_value : In stream of W elements, the first one lowest.
    o : Out stream of struct {data: W elements, last: 1}.

    Raises
    ------
    ValueError : another `width` or `element_bits`.
    """

    #: Cycles from a beat on `i_bitmap` to `o`.
    LATENCY = 3
    #: Cycles from a word on `i_value` to `o`.
    VALUE_LATENCY = 4

    def __init__(self, width: int, element_bits: int) -> None:
        if width not in (4, 8, 16, 32, 64):
            raise ValueError(f"width must be a power of two from 4 to 64 elements, not {width!r}")
        if element_bits not in (1, 2, 8, 16):
            raise ValueError(f"element_bits must be 1, 2, 8 or 16, not {element_bits!r}")
        self.width, self.element_bits = width, element_bits
        super().__init__(
            {
                "i_bitmap": In(stream.Signature(data.StructLayout({"bits": width, "last": 1}))),
                "i_value": In(stream.Signature(width * element_bits)),
                "o": Out(stream.Signature(data.StructLayout({"data": width * element_bits, "last": 1}))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Three stages, each with registers behind it that move when the next ones do."""
        m = Module()
        width = self.width
        valid = [Signal(name=f"valid_{k}") for k in range(2)]  # of stages 0 and 1
        moves = Signal(3)  # stage k takes a beat
        lacks, taken = Signal(), Signal()  # values; a beat goes from stage 0 to stage 1
        m.d.comb += [
            moves[2].eq(self.o.ready | ~self.o.valid),
            moves[1].eq(moves[2] | ~valid[1]),
            taken.eq(valid[0] & moves[1] & ~lacks),
            moves[0].eq(~valid[0] | taken),
            self.i_bitmap.ready.eq(moves[0]),
        ]
        with m.If(moves[0]):
            m.d.sync += valid[0].eq(self.i_bitmap.valid)
        with m.If(moves[1]):
            m.d.sync += valid[1].eq(taken)
        with m.If(moves[2]):
            m.d.sync += self.o.valid.eq(valid[1])

        # Stage 0: ones below each place.
        beat = self.i_bitmap.payload
        bits, last = register(m, moves[0], beat.bits, "bits_0"), register(m, moves[0], beat.last, "last_0")
        ones = [register(m, moves[0], count, f"ones_{k}") for k, count in enumerate(prefix_counts(m, beat.bits))]

        # Stage 1: the next values, and the way that they are to go.
        packed = register(m, moves[1], self._values(m, ones[-1], last, taken, lacks), "packed")
        distances = [wire(m, (C(k) - ones[k])[: (width - 1).bit_length()]) for k in range(width)]
        levels = [
            Level(
                level.step,
                [register(m, moves[1], digit, f"shift_{level.step}_{k}") for k, digit in enumerate(level.digits)],
            )
            for level in scatter_levels(m, bits, distances)
        ]
        bits, last = register(m, moves[1], bits, "bits_1"), register(m, moves[1], last, "last_1")

        # Stage 2: the values at their places.
        with m.If(moves[2]):
            m.d.sync += [
                self.o.payload.data.eq(scatter(m, packed, bits, levels, self.element_bits)),
                self.o.payload.last.eq(last),
            ]
        return m

    def _values(self, m: Module, count: Any, last: Any, taken: Signal, lacks: Signal) -> Any:
        """W values from the window's place on; `taken` takes `count` of them, and with `last` ends the row."""
        width, word_bits = self.width, self.width * self.element_bits
        words = [Signal(word_bits, name=f"word_{k}", reset_less=True) for k in range(2)]
        full, place = [Signal(name=f"full_{k}") for k in range(2)], Signal(range(width))
        end = Signal(range(2 * width))
        drop, both, moves = Signal(), Signal(), Signal()
        m.d.comb += [
            end.eq(place + count),
            lacks.eq(((count != 0) & ~full[0]) | ((end > width) & ~full[1])),
            drop.eq(taken & ((end >= width) | (last & (end != 0)))),
            both.eq(last & (end > width)),
            moves.eq(drop | ~full[0]),
            self.i_value.ready.eq(moves | ~full[1]),
        ]
        with m.If(taken):
            m.d.sync += place.eq(Mux(last, 0, end))
        with m.If(moves):
            m.d.sync += [words[0].eq(words[1]), full[0].eq(full[1] & ~(drop & both)), full[1].eq(0)]
        with m.If(self.i_value.ready):
            m.d.sync += [words[1].eq(self.i_value.payload), full[1].eq(self.i_value.valid)]
        return funnel(m, Cat(words)[: -self.element_bits], place, self.element_bits, width)
