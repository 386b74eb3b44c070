"""Values with exponents coded in levels: planes of bits to words of W values.

    i_first ─► queue ─► LevelStage ─► queue ─► LevelStage ─► queue ─► LevelStage ─► queue ─► LevelStage ─► queue ─► o
    i_second ──────────────┘  i_third ────────────┘  i_fourth ───────────┘  i_escape ───────────┘            ▲
    i_codebook, i_value, i_low, i_middle ────────────────────────────────────────────────────────────────────┘

Contract: a word of values for each beat of first codes, in order. A code that is its level's last one (all ones) takes
the next code of the level behind it; that of the fourth level the next exponent of i_escape. A beat of first codes with
`last` ends a block; what is left of the words that it took from is dropped, so that each block's codes begin with a
word. A block takes a word of the plane of values for each of its beats, in fp16 one of the low and of the middle plane
too, and one codebook, which leaves with its last word. Codes past the block's values must not be the last one; what
they become is not defined. A block without values has nothing in any plane, nor a codebook. `bf16` and `wide` stand
while anything is inside. Reset drops what is inside.

Timing: latency LATENCY cycles from a beat of first codes, VALUE_LATENCY from a word of values, low, middle or a
codebook where that comes later; one word a cycle, whatever the codes are, and at a block's end as many more as levels
whose last beat takes from two words; back-pressure: yes. o comes from registers.
Numerics: bits are moved as they are; equals nearflash.model.weights.levels. Of an exponent's byte fp16 takes the lower
five bits.
"""

from collections.abc import Sequence
from typing import Any

from amaranth import C, Cat, Module, Mux
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.coded import CODEBOOK_ENTRIES_MAX, count_entries
from nearflash.abi.formats import BF16, FP16
from nearflash.gateware.fp.pipeline import select_digit, wire
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.weights.level_stage import LevelStage

__all__ = ["LevelValues"]

_BYTE = 8
_ENTRY_BITS = 4
_BEATS = 2
"""In the queues between levels, which keep the ways of ready apart."""
_NARROW_ENTRIES = count_entries(1)
_FIELD_BITS = (1, 2, 2)
"""Of the second, third and fourth level's codes, at most."""


class LevelValues(wiring.Component):
    """Follows codes from level to level.

    Parameters
    ----------
    width : values a word (W), a power of two from 4 to 64.

    Members
    -------
    bf16 : In, format of the values: bf16, else fp16. wide : In, codes of the first and third level have two bits.
    i_codebook : In stream of CODEBOOK_ENTRIES_MAX bytes, an item a block.
    i_first : In stream of struct {codes: W · 2 bits, last: 1}. i_second : In stream of W bits.
    i_third, i_fourth : In streams of W · 2 bits. i_escape : In stream of W bytes.
    i_low : In stream of W bits, i_middle : In stream of W · 2 bits; fp16 only. i_value : In stream of W bytes.
    o : Out stream of W · 16 bits, as BitmapExpander.i_value takes them.

    Raises
    ------
    ValueError : another `width`.
    """

    #: Cycles from a beat on `i_first` to `o`.
    LATENCY = 4 * LevelStage.LATENCY + 5 * StreamQueue.LATENCY["distributed"] + 1
    #: Cycles from the last one of `i_value`, `i_low`, `i_middle` and `i_codebook` to `o`.
    VALUE_LATENCY = 1

    def __init__(self, width: int) -> None:
        self.width = width
        self._stages = [LevelStage(width, bits, width * _ENTRY_BITS) for bits in (*_FIELD_BITS, _BYTE)]
        super().__init__(
            {
                "bf16": In(1),
                "wide": In(1),
                "i_codebook": In(stream.Signature(CODEBOOK_ENTRIES_MAX * _BYTE)),
                "i_first": In(stream.Signature(data.StructLayout({"codes": 2 * width, "last": 1}))),
                "i_second": In(stream.Signature(width)),
                "i_third": In(stream.Signature(2 * width)),
                "i_fourth": In(stream.Signature(2 * width)),
                "i_escape": In(stream.Signature(width * _BYTE)),
                "i_low": In(stream.Signature(width)),
                "i_middle": In(stream.Signature(2 * width)),
                "i_value": In(stream.Signature(width * _BYTE)),
                "o": Out(stream.Signature(width * FP16.bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Levels one behind the other; the entry in the codebook is the sum of a value's codes."""
        m = Module()
        lanes = range(self.width)
        last_codes = [Mux(self.wide, 3, 1), C(1, 1), Mux(self.wide, 3, 1), C(3, 2)]
        given, fields = self.i_first, [self.i_first.payload.codes.word_select(k, 2) for k in lanes]
        entries: Sequence[Any] = fields
        sources = (self.i_second, self.i_third, self.i_fourth, self.i_escape)
        for number, (stage, source, last_code) in enumerate(zip(self._stages, sources, last_codes, strict=True)):
            m.submodules[f"stage_{number}"] = stage
            m.submodules[f"beats_{number}"] = beats = StreamQueue(stage.i.payload.shape(), _BEATS)
            # The mask ahead of the queue: its reads and the counts of the expander are long enough without it.
            m.d.comb += [
                beats.i.payload.mask.eq(Cat(field == last_code for field in fields)),
                beats.i.payload.beside.eq(Cat(wire(m, (entry + C(0, _ENTRY_BITS))[:_ENTRY_BITS]) for entry in entries)),
                beats.i.payload.last.eq(given.payload.last),
                beats.i.valid.eq(given.valid),
                given.ready.eq(beats.i.ready),
            ]
            wiring.connect(m, beats.o, stage.i)
            wiring.connect(m, wiring.flipped(source), stage.i_field)
            given, size = stage.o, len(stage.o.payload.fields) // self.width
            fields = [stage.o.payload.fields.word_select(k, size) for k in lanes]
            before = [stage.o.payload.beside.word_select(k, _ENTRY_BITS) for k in lanes]
            entries = [wire(m, (entry + field)[:_ENTRY_BITS]) for entry, field in zip(before, fields, strict=True)]
        m.submodules.exponents = exponents = StreamQueue(given.payload.shape(), _BEATS)
        wiring.connect(m, given, exponents.i)
        self._join(m, exponents.o)
        return m

    def _join(self, m: Module, exponents: Any) -> None:
        """Values of a beat of entries and escaped exponents, and the other planes."""
        taken = wire(
            m,
            exponents.valid
            & self.i_value.valid
            & ((self.i_low.valid & self.i_middle.valid) | self.bf16)
            & self.i_codebook.valid
            & (self.o.ready | ~self.o.valid),
        )
        m.d.comb += [
            exponents.ready.eq(taken),
            self.i_value.ready.eq(taken),
            self.i_low.ready.eq(taken & ~self.bf16),
            self.i_middle.ready.eq(taken & ~self.bf16),
            self.i_codebook.ready.eq(taken & exponents.payload.last),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(taken):
            m.d.sync += [
                self.o.payload.eq(Cat(self._value(m, exponents.payload, lane) for lane in range(self.width))),
                self.o.valid.eq(1),
            ]

    def _value(self, m: Module, exponents: Any, lane: int) -> Any:
        """The value of a lane: an entry behind the codebook's has its exponent beside it, the others have 0 there."""
        book = [self.i_codebook.payload.word_select(entry, _BYTE) for entry in range(CODEBOOK_ENTRIES_MAX)]
        narrow = [*book[:_NARROW_ENTRIES], *[C(0, _BYTE)] * (CODEBOOK_ENTRIES_MAX - _NARROW_ENTRIES)]
        known = [wire(m, Mux(self.wide, *pair)) for pair in zip(book, narrow, strict=True)]
        entry = exponents.beside.word_select(lane, _ENTRY_BITS)
        choices = [*known, *[C(0, _BYTE)] * ((1 << _ENTRY_BITS) - len(known))]
        quarters = [wire(m, select_digit(entry[:2], choices[at : at + 4])) for at in range(0, len(choices), 4)]
        exponent = wire(m, select_digit(entry[2:], quarters) | exponents.fields.word_select(lane, _BYTE))
        high = self.i_value.payload.word_select(lane, _BYTE)
        low = Cat(self.i_low.payload[lane], self.i_middle.payload.word_select(lane, 2))
        fp16 = Cat(low, high[:-1], exponent[: FP16.exponent_bits], high[-1])
        return Mux(self.bf16, Cat(high[:-1], exponent[: BF16.exponent_bits], high[-1]), fp16)
