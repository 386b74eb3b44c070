"""Coded values: planes of bits, with the exponents as codes of a codebook, to words of W values.

    i_escape ──► BitmapExpander ─► queue ─► exponents ─┐
    i_code ──┴─► queue ─► codes ───────────────────────┼─► o
    i_codebook, i_value, i_low ────────────────────────┘

Contract: a word of values for each beat of codes, in order. Each code of ESCAPE takes the next exponent; a beat of
codes with `last` ends a row, and what is left of the word of exponents that it took from is dropped, so that each row's
exponents begin with a word. A row takes a word of the plane of values for each of its beats, in fp16 one of the low
plane too, and one codebook, which leaves with its last word. Fields past the row's values must not have the code
ESCAPE; what they become is not defined. A row without values has nothing in any plane, nor a codebook. `bf16` stands
while anything is inside. Reset drops what is inside.

Timing: latency LATENCY cycles from a beat of codes, ESCAPE_LATENCY from a word of exponents and VALUE_LATENCY from any
other plane where that comes later; one word a cycle, however many codes are escapes, and one cycle more for a row whose
last beat takes exponents from two words; back-pressure: yes. o comes from registers; the ready of i_value, i_low and
i_codebook depends on o.ready and on each other's valid, that of i_code and i_escape on neither.
Numerics: bits are moved as they are; equals nearflash.model.weights.coded.decode. Of an exponent's byte fp16 takes the
lower five bits.
"""

from typing import Any

from amaranth import Cat, Module, Mux
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import CODEBOOK_ENTRIES, SECTIONS, RowFormat, Section
from nearflash.abi.formats import BF16, FP16
from nearflash.gateware.fp.pipeline import register, select_digit, wire
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.weights.bitmap import BitmapExpander

__all__ = ["CodedValues"]

_FIELD_BITS, _CODE_BITS = (SECTIONS[form][Section.CODES] for form in (RowFormat.CODED_FP16, RowFormat.CODED_BF16))
_BYTE = 8
_EXPONENTS = 2
"""Beats in their queue, which keeps the ways of ready apart."""


class CodedValues(wiring.Component):
    """Puts values together.

    Parameters
    ----------
    width : values a word (W), a power of two from 4 to 64.

    Members
    -------
    bf16 : In, format of the values: bf16, else fp16.
    i_codebook : In stream of 3 bytes, an item a row.
    i_low : In stream of W bits; fp16 only.
    i_code : In stream of struct {codes: W · 4 bits, last: 1}; of a field, bf16 takes the lower two bits.
    i_escape : In stream of W bytes.
    i_value : In stream of W bytes.
    o : Out stream of W · 16 bits, as BitmapExpander.i_value takes them.

    Raises
    ------
    ValueError : another `width`.
    """

    #: Cycles from a beat on `i_code` to `o`.
    LATENCY = BitmapExpander.LATENCY + StreamQueue.LATENCY["distributed"] + 1
    #: Cycles from a word on `i_escape` to `o`.
    ESCAPE_LATENCY = LATENCY + BitmapExpander.VALUE_LATENCY - BitmapExpander.LATENCY
    #: Cycles from the last one of `i_value`, `i_low` and `i_codebook` to `o`.
    VALUE_LATENCY = 1

    def __init__(self, width: int) -> None:
        self._escapes, self.width = BitmapExpander(width, _BYTE), width
        super().__init__(
            {
                "bf16": In(1),
                "i_codebook": In(stream.Signature(CODEBOOK_ENTRIES * _BYTE)),
                "i_low": In(stream.Signature(width)),
                "i_code": In(stream.Signature(data.StructLayout({"codes": width * _FIELD_BITS, "last": 1}))),
                "i_escape": In(stream.Signature(width * _BYTE)),
                "i_value": In(stream.Signature(width * _BYTE)),
                "o": Out(stream.Signature(width * FP16.bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The queue of codes holds those of the beats in the expander, at most its LATENCY, and in the other queue."""
        m = Module()
        m.submodules.escapes = escapes = self._escapes
        m.submodules.exponents = exponents = StreamQueue(escapes.o.payload.shape(), _EXPONENTS)
        m.submodules.codes = codes = StreamQueue(self.width * _FIELD_BITS, escapes.LATENCY + _EXPONENTS + 1)
        taken = wire(
            m,
            exponents.o.valid
            & self.i_value.valid
            & (self.i_low.valid | self.bf16)
            & self.i_codebook.valid
            & (self.o.ready | ~self.o.valid),
        )
        wiring.connect(m, wiring.flipped(self.i_escape), escapes.i_value)
        wiring.connect(m, escapes.o, exponents.i)
        m.d.comb += [
            escapes.i_bitmap.payload.bits.eq(Cat(code.all() for code in self._codes(self.i_code.payload.codes))),
            escapes.i_bitmap.payload.last.eq(self.i_code.payload.last),
            escapes.i_bitmap.valid.eq(self.i_code.valid),
            self.i_code.ready.eq(escapes.i_bitmap.ready),
            codes.i.payload.eq(register(m, self.i_code.payload.codes)),
            exponents.o.ready.eq(taken),
            codes.o.ready.eq(taken),
            self.i_value.ready.eq(taken),
            self.i_low.ready.eq(taken & ~self.bf16),
            self.i_codebook.ready.eq(taken & exponents.o.payload.last),
        ]

        # A cycle late, off the way of the expander's ready.
        m.d.sync += codes.i.valid.eq(self.i_code.valid & self.i_code.ready)
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(taken):
            m.d.sync += [
                self.o.payload.eq(self._values(m, codes.o.payload, exponents.o.payload.data)),
                self.o.valid.eq(1),
            ]
        return m

    def _codes(self, fields: Any) -> list[Any]:
        """The lower two bits of each field of a beat."""
        return [fields.word_select(k, _FIELD_BITS)[:_CODE_BITS] for k in range(self.width)]

    def _values(self, m: Module, fields: Any, escaped: Any) -> Any:
        book = [self.i_codebook.payload.word_select(entry, _BYTE) for entry in range(CODEBOOK_ENTRIES)]
        values = []
        for k, code in enumerate(self._codes(fields)):
            exponent = wire(m, select_digit(code, [*book, escaped.word_select(k, _BYTE)]))
            high = self.i_value.payload.word_select(k, _BYTE)
            low = Cat(self.i_low.payload[k], fields.word_select(k, _FIELD_BITS)[_CODE_BITS:])
            fp16 = Cat(low, high[:-1], exponent[: FP16.exponent_bits], high[-1])
            bf16 = Cat(high[:-1], exponent[: BF16.exponent_bits], high[-1])
            values.append(Mux(self.bf16, bf16, fp16))
        return Cat(values)
