"""Rows of a matrix: sections to dense words, each row padded with zeros to a multiple of 64 bytes.

    i_row ─► queue ─┬─► o_row
                    ├─► i_bitmap ─► queue ─► Narrow ─► BitmapExpander ─► Dequantizer ─► Pack ─► o
                    ├─► i_values, ... ─► RowValues ──────────┘               │
                    └─► i_scales ─► queue ─► Narrow ─────────────────────────┘

Contract: for each row that is said on `i_row`, its dense words leave on `o`, and `o_row` says that they will; sections
of rows that are not said stay in the queues, which have room for a row of `columns_max` columns. `columns` and
the formats stand while anything is inside. Reset drops what is inside.

Timing: one group of `width` elements a cycle while values come; back-pressure: yes.
Numerics: equals nearflash.model.weights.bitmap.expand.
"""

from collections.abc import Collection
from typing import Any

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SCALE_COLUMNS, SECTION_BYTES, RowFormat
from nearflash.abi.coded import LevelFormat
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.gearbox import Narrow, pieces
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.weights.bitmap import BitmapExpander
from nearflash.gateware.weights.block_values import BLOCK_STREAMS, BlockValues
from nearflash.gateware.weights.dequantize import Dequantizer
from nearflash.gateware.weights.full_bitmap import FullBitmap
from nearflash.gateware.weights.matrix import SCALED, block_layout, is_levels, queue_words, row_layout
from nearflash.gateware.weights.pack import LanePack
from nearflash.gateware.weights.row_values import LANE_BITS, PRESENT_BIT, RowValues

__all__ = ["RowExpander"]

_ROWS = 4
_BEATS = 2
"""In queues before the expander, which keep its way of ready from those of the gearboxes."""
_SCALE_BITS = 32
_BLOCK_ELEMENTS = SECTION_BYTES // 2
"""Of 16 bits, as those of coded weights are."""


class RowExpander(wiring.Component):
    """Expands rows.

    Parameters
    ----------
    width : elements of a group (W), at most as many as 64 bytes of a row have.
    port_bits : of a word, at least 16 · W.
    columns_max : longest row.
    formats : row formats that it knows; without scaled ones there is no Dequantizer.
    levels : whether it knows the blocks of coded weights, too: a row may be one.

    Members
    -------
    has_bitmap, wide : In, of coded weights: whether blocks have a bitmap, and codes of two bits; with `levels` only.
    columns, row_format : In. bf16 : In, whether scaled elements expand to bf16, else fp16.
    i_row : In stream of `row_layout(columns_max)`, with `levels` of `block_layout(columns_max)`; o_row : Out stream of
        the same.
    i_bitmap, i_values, ... : In streams of words: those of RowValues, with scaled formats i_scales, with `levels`
        those of BlockValues.
    o : Out stream of words.
    idle : Out, every row that was said is on `o_row`.
    """

    def __init__(
        self, width: int, port_bits: int, columns_max: int, formats: Collection[RowFormat], levels: bool = False
    ) -> None:
        self.width, self.port_bits, self.columns_max, self.levels = width, port_bits, columns_max, levels
        self._values = RowValues(width, port_bits, columns_max, formats)
        self._scaled = any(form in SCALED for form in formats)
        planes = tuple(section.name.lower() for section in self._values.sections)
        #: Sections that it takes.
        self.streams = ("bitmap", *planes, *(("scales",) if self._scaled else ()))
        if levels:
            self._blocks = BlockValues(width, port_bits, columns_max)
            self.streams = tuple(dict.fromkeys((*self.streams, *BLOCK_STREAMS)))
        row = stream.Signature((block_layout if levels else row_layout)(columns_max))
        super().__init__(
            {
                "columns": In(range(columns_max + 1)),
                "row_format": In(RowFormat),
                "bf16": In(1),
                **(dict.fromkeys(("has_bitmap", "wide"), In(1)) if levels else {}),
                "i_row": In(row),
                "o_row": Out(row),
                **{f"i_{name}": In(stream.Signature(port_bits)) for name in self.streams},
                "o": Out(stream.Signature(port_bits)),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A row goes to the bitmap's gearbox, to the values, and out."""
        m = Module()
        width, port_bits, row = self.width, self.port_bits, self.i_row.payload.shape()
        m.submodules.rows = rows = StreamQueue(row, _ROWS)
        m.submodules.fork = fork = Fork(row, 5 if self.levels else 4)
        m.submodules.bitmap_queue = queue = StreamQueue(
            port_bits, queue_words(self.columns_max, 1, port_bits), memory="block"
        )
        m.submodules.bitmap_groups = groups = Narrow(width, port_bits // width)
        m.submodules.values = values = self._values
        m.submodules.expander = expander = BitmapExpander(width, LANE_BITS)
        m.submodules.bitmap_beats = beats = StreamQueue(expander.i_bitmap.payload.shape(), _BEATS)
        m.submodules.value_beats = words = StreamQueue(width * LANE_BITS, _BEATS)
        m.submodules.pack = pack = LanePack(width, port_bits)
        to_bitmap, to_values, to_scales, out, *to_blocks = fork.o
        for source, sink in (
            (wiring.flipped(self.i_row), rows.i),
            (rows.o, fork.i),
            (out, wiring.flipped(self.o_row)),
            *(() if self.levels else ((to_values, values.i_row),)),
            (wiring.flipped(self.i_bitmap), queue.i),
            (queue.o, groups.i),
            *(() if self.levels else self._ways(values, words)),
            (words.o, expander.i_value),
            (beats.o, expander.i_bitmap),
            (pack.o, wiring.flipped(self.o)),
        ):
            wiring.connect(m, source, sink)
        narrow = self.row_format == RowFormat.PLAIN8
        blocks = [pieces(self.columns, SECTION_BYTES // size) * (SECTION_BYTES // size // width) for size in (2, 1)]
        count = Signal.like(groups.i_count.payload) if self.levels else groups.i_count.payload
        m.d.sync += count.eq(Mux(narrow, blocks[1], blocks[0]))  # stands long before a row
        if self.levels:
            m.d.comb += groups.i_count.payload.eq(count)
        m.d.comb += [
            values.row_format.eq(self.row_format),
            groups.i_count.valid.eq(to_bitmap.valid),
            to_bitmap.ready.eq(groups.i_count.ready),
            beats.i.payload.bits.eq(groups.o.payload.data),
            beats.i.payload.last.eq(groups.o.payload.last),
            beats.i.valid.eq(groups.o.valid),
            groups.o.ready.eq(beats.i.ready),
            pack.narrow.eq(narrow),
            self.idle.eq(rows.level == 0),
        ]
        if self.levels:
            self._choose_values(m, to_values, to_blocks[0], words)
            self._choose_bitmap(m, to_bitmap, groups, beats)
        elements = self._dequantize(m, to_scales, expander.o) if self._scaled else expander.o
        if not self._scaled:
            m.d.comb += to_scales.ready.eq(1)
        m.d.comb += [
            pack.i.payload.eq(elements.payload.data),
            pack.i.valid.eq(elements.valid),
            elements.ready.eq(pack.i.ready),
        ]
        return m

    def _ways(self, values: RowValues, words: StreamQueue) -> list[tuple[Any, Any]]:
        """Sections to the values, and these on."""
        names = [f"i_{section.name.lower()}" for section in values.sections]
        sections = [(wiring.flipped(getattr(self, name)), getattr(values, name)) for name in names]
        return [*sections, (values.o, words.i)]

    def _choose_values(self, m: Module, row: Any, block: Any, words: StreamQueue) -> None:
        """Sections to RowValues or to BlockValues, as the format is, and from there to the expander."""
        values, blocks = self._values, self._blocks
        m.submodules.blocks = blocks
        levels = is_levels(self.row_format)
        m.d.comb += [
            blocks.bf16.eq(self.row_format == LevelFormat.LEVELS_BF16),
            blocks.wide.eq(self.wide),
            *(values.i_row.payload[name].eq(row.payload[name]) for name in values.i_row.payload.shape().members),
            blocks.i_row.payload.eq(block.payload),
        ]
        both = ((values.i_row, row, ~levels), (blocks.i_row, block, levels))
        for sink, source, wanted in both:
            m.d.comb += [sink.valid.eq(source.valid & wanted), source.ready.eq(sink.ready | ~wanted)]
        for name in self.streams:
            source = getattr(self, f"i_{name}")
            sinks = [(getattr(unit, f"i_{name}"), wanted) for unit, wanted in ((values, ~levels), (blocks, levels))
                     if hasattr(unit, f"i_{name}")]  # fmt: skip
            for sink, wanted in sinks:
                m.d.comb += [sink.payload.eq(source.payload), sink.valid.eq(source.valid & wanted)]
            if sinks:
                m.d.comb += source.ready.eq(Cat(sink.ready & wanted for sink, wanted in sinks).any())
        m.d.comb += [
            words.i.payload.eq(Mux(levels, blocks.o.payload, values.o.payload)),
            words.i.valid.eq(Mux(levels, blocks.o.valid, values.o.valid)),
            blocks.o.ready.eq(words.i.ready & levels),
            values.o.ready.eq(words.i.ready & ~levels),
        ]

    def _choose_bitmap(self, m: Module, row: Any, groups: Narrow, beats: StreamQueue) -> None:
        """Groups of a block as many as it has elements, of ones where it has no bitmap."""
        m.submodules.full_bitmap = full = FullBitmap(self.width, self.columns_max)
        levels, lanes = is_levels(self.row_format), self.width
        whole = levels & ~self.has_bitmap
        with m.If(levels):
            m.d.comb += [
                groups.i_count.payload.eq(pieces(row.payload.columns, _BLOCK_ELEMENTS) * (_BLOCK_ELEMENTS // lanes)),
                groups.i_count.valid.eq(row.valid & self.has_bitmap),
                row.ready.eq(Mux(whole, full.i_count.ready, groups.i_count.ready)),
            ]
        m.d.comb += [
            full.i_count.payload.eq(row.payload.columns),
            full.i_count.valid.eq(row.valid & whole),
            full.o.ready.eq(beats.i.ready & whole),
        ]
        with m.If(whole):
            m.d.comb += [beats.i.payload.eq(full.o.payload), beats.i.valid.eq(full.o.valid), groups.o.ready.eq(0)]

    def _dequantize(self, m: Module, row: Any, expanded: Any) -> Any:
        """Scales beside the expanded codes, whose lanes say which of them are there."""
        lanes, words = range(self.width), queue_words(self.columns_max // SCALE_COLUMNS, _SCALE_BITS, self.port_bits)
        m.submodules.scale_queue = queue = StreamQueue(self.port_bits, words, memory="block")
        m.submodules.scale_groups = scales = Narrow(_SCALE_BITS, self.port_bits // _SCALE_BITS)
        m.submodules.dequantizer = dequantizer = Dequantizer(self.width)
        scaled = Cat(self.row_format == form for form in SCALED).any()
        wiring.connect(m, wiring.flipped(self.i_scales), queue.i)
        wiring.connect(m, queue.o, scales.i)
        m.d.sync += scales.i_count.payload.eq(pieces(self.columns, SCALE_COLUMNS))
        m.d.comb += [
            scales.i_count.valid.eq(row.valid & scaled),
            # Without scales the row passes: the other sections wait for this copy of it.
            row.ready.eq(scales.i_count.ready | ~scaled),
            dequantizer.scaled.eq(scaled),
            dequantizer.bf16.eq(self.bf16),
            dequantizer.i_scale.payload.eq(scales.o.payload.data),
            dequantizer.i_scale.valid.eq(scales.o.valid),
            scales.o.ready.eq(dequantizer.i_scale.ready),
            dequantizer.i.payload.data.eq(expanded.payload.data),
            dequantizer.i.payload.present.eq(
                Cat(expanded.payload.data.word_select(lane, LANE_BITS)[PRESENT_BIT] for lane in lanes)
            ),
            dequantizer.i.payload.last.eq(expanded.payload.last),
            dequantizer.i.valid.eq(expanded.valid),
            expanded.ready.eq(dequantizer.i.ready),
        ]
        return dequantizer.o
