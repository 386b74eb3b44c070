"""Values of rows: what a format keeps of them to words of W lanes of 16 bits, as BitmapExpander takes them.

    i_values ──► queue ─► Unpack ─┬───────────────────┬─► o
    i_low ─────► queue ─► Unpack ─┤                   │
    i_codes ───► queue ─► Unpack ─┼─► CodedValues ────┘
    i_escapes ─► queue ─► Unpack ─┘

Contract: a row of n values gives ceil(n / W) words; values of less than 16 bits lie in the low bits of their lanes.
With scales, bit PRESENT_BIT of a lane is set too: the lane of a code of zero is not zero. `row_format` stands while
anything is inside. The queues have room for a row of `columns_max` values, that of `i_values`, which may come last, for
fewer. Reset drops what is inside.

Timing: one word a cycle while the sections come; back-pressure: yes.
Numerics: bits are moved as they are; equals nearflash.model.weights.coded.decode.
"""

from collections.abc import Collection
from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SECTIONS, RowFormat, Section
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.weights.coded import CodedValues
from nearflash.gateware.weights.matrix import CODED, SCALED, queue_words, row_layout
from nearflash.gateware.weights.unpack import FieldUnpack

__all__ = ["LANE_BITS", "PRESENT_BIT", "RowValues"]

LANE_BITS = 16
PRESENT_BIT = 8
_VALUE_WORDS = 513
"""Words of values that wait while the first sections of the next row come: a block RAM's."""
_CODEBOOKS = 2
"""Of rows whose codes may come while the values of the row before do."""
_PLANES = (Section.LOW, Section.CODES, Section.ESCAPES)


class RowValues(wiring.Component):
    """Queues and gearboxes of values.

    Parameters
    ----------
    width : lanes of a word (W).
    port_bits : of a word of a section.
    columns_max : longest row.
    formats : row formats; without coded ones there are no planes.

    Members
    -------
    row_format : In.
    i_row : In stream of `row_layout(columns_max)`.
    i_values, i_low, i_codes, i_escapes : In streams of words of sections; the last three with coded formats only.
    o : Out stream of W · 16 bits.
    """

    def __init__(self, width: int, port_bits: int, columns_max: int, formats: Collection[RowFormat]) -> None:
        self.width, self.port_bits, self.columns_max = width, port_bits, columns_max
        self.formats = tuple(formats)
        coded = any(form in CODED for form in self.formats)
        self.sections = (Section.VALUES, *(_PLANES if coded else ()))
        super().__init__(
            {
                "row_format": In(RowFormat),
                "i_row": In(stream.Signature(row_layout(columns_max))),
                **{f"i_{section.name.lower()}": In(stream.Signature(port_bits)) for section in self.sections},
                "o": Out(stream.Signature(width * LANE_BITS)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A gearbox a section; then the plain way, and beside it the other one."""
        m = Module()
        m.submodules.fork = fork = Fork(self.i_row.payload.shape(), len(self.sections) + 1)
        wiring.connect(m, wiring.flipped(self.i_row), fork.i)
        coded = Cat(self.row_format == form for form in CODED).any()
        parts = {section: self._section(m, section, row) for section, row in zip(self.sections, fork.o, strict=False)}
        values, to_codebook = parts.pop(Section.VALUES), fork.o[-1]
        scaled = Cat(self.row_format == form for form in SCALED).any()
        present = Cat(Const(1 << PRESENT_BIT, LANE_BITS) for _ in range(self.width))
        m.d.comb += [
            self.o.payload.eq(values.o.payload.data | Mux(scaled, present, 0)),
            self.o.valid.eq(values.o.valid),
            values.o.ready.eq(self.o.ready),
            # In a build without coded formats nobody wants the copy; below, CodedValues' queue decides.
            to_codebook.ready.eq(1),
        ]
        if parts:
            self._decode_coded(m, coded, values, parts, to_codebook)
        return m

    def _section(self, m: Module, section: Section, row: Any) -> FieldUnpack:
        """Its fields, as many as the row says; of a row of another format none."""
        name = section.name.lower()
        sizes = sorted({SECTIONS[form][section] for form in self.formats if section in SECTIONS[form]})
        lane_bits = LANE_BITS if section is Section.VALUES else max(sizes)
        count_bits = self.columns_max.bit_length()
        if section is Section.VALUES:
            queue = StreamQueue(self.port_bits, _VALUE_WORDS, memory="block")
        else:
            # Two rows, but of escapes, which are few, one.
            fields = self.columns_max // 2 if section is Section.ESCAPES else self.columns_max
            queue = StreamQueue(self.port_bits, queue_words(fields, max(sizes), self.port_bits), memory="block")
        unpack = FieldUnpack(self.width, self.port_bits, sizes, lane_bits=lane_bits, count_bits=count_bits)
        m.submodules[f"{name}_queue"], m.submodules[f"{name}_fields"] = queue, unpack
        wiring.connect(m, wiring.flipped(getattr(self, f"i_{name}")), queue.i)
        wiring.connect(m, queue.o, unpack.i)
        wanted = Signal(name=f"{name}_wanted")
        with m.Switch(self.row_format):
            for form in self.formats:
                if section in SECTIONS[form]:
                    with m.Case(form):
                        m.d.comb += [wanted.eq(1), unpack.size.eq(sizes.index(SECTIONS[form][section]))]
        m.d.comb += [
            unpack.i_count.payload.eq(row.payload.escapes if section is Section.ESCAPES else row.payload.values),
            unpack.i_count.valid.eq(row.valid & wanted),
            # Of a row without this section the copy is taken at once: it would hold the other sections back.
            row.ready.eq(unpack.i_count.ready | ~wanted),
        ]
        return unpack

    def _decode_coded(
        self, m: Module, coded: Any, values: FieldUnpack, planes: dict[Section, FieldUnpack], row: Any
    ) -> None:
        """Planes to CodedValues, which has a codebook for each row with values."""
        m.submodules.coded = unit = CodedValues(self.width)
        m.submodules.codebooks = codebooks = StreamQueue(row.payload.codebook.shape(), _CODEBOOKS)
        wiring.connect(m, codebooks.o, unit.i_codebook)
        bf16 = self.row_format == RowFormat.CODED_BF16
        fields, ends = planes[Section.CODES].o.payload.data, planes[Section.CODES].o.payload.last
        # A row without values takes no codebook: the next row would get it.
        some = row.payload.values != 0
        m.d.comb += [
            unit.bf16.eq(bf16),
            codebooks.i.payload.eq(row.payload.codebook),
            codebooks.i.valid.eq(row.valid & coded & some),
            row.ready.eq(codebooks.i.ready | ~(coded & some)),
            unit.i_code.payload.codes.eq(fields),
            unit.i_code.payload.last.eq(ends),
            unit.i_low.payload.eq(planes[Section.LOW].o.payload.data),
            unit.i_escape.payload.eq(planes[Section.ESCAPES].o.payload.data),
            unit.i_value.payload.eq(
                Cat(values.o.payload.data.word_select(lane, LANE_BITS)[:8] for lane in range(self.width))
            ),
            unit.i_value.valid.eq(values.o.valid & coded),
            values.o.ready.eq(Mux(coded, unit.i_value.ready, self.o.ready)),
            self.o.valid.eq(Mux(coded, unit.o.valid, values.o.valid)),
            unit.o.ready.eq(self.o.ready & coded),
        ]
        with m.If(coded):
            m.d.comb += self.o.payload.eq(unit.o.payload)
        for section, stream_in in {
            Section.LOW: unit.i_low, Section.CODES: unit.i_code, Section.ESCAPES: unit.i_escape
        }.items():  # fmt: skip
            m.d.comb += [stream_in.valid.eq(planes[section].o.valid), planes[section].o.ready.eq(stream_in.ready)]
