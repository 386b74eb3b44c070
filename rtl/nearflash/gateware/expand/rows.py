"""Rows of a matrix: sections to dense words, each row padded with zeros to a multiple of 64 bytes.

    i_row ─► queue ─┬─► o_row
                    ├─► i_bitmap ─► queue ─► Narrow ─► BitmapExpander ─► Pack ─► o
                    └─► i_values, ... ─► RowValues ──────────┘

Contract: for each row that is said on `i_row`, its dense words leave on `o`, and `o_row` says that they will; sections
of rows that are not said stay in the queues, which have room for a row of `columns_max` columns. `columns` and
`row_format` stand while anything is inside. Reset drops what is inside.

Timing: one group of `width` elements a cycle while values come; back-pressure: yes.
Numerics: equals nearflash.model.expand.bitmap.expand.
"""

from collections.abc import Collection

from amaranth import Module, Mux
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SECTION_BYTES, RowFormat
from nearflash.gateware.expand.bitmap import BitmapExpander
from nearflash.gateware.expand.matrix import row_layout
from nearflash.gateware.expand.pack import Pack
from nearflash.gateware.expand.row_values import LANE_BITS, RowValues
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.gearbox import Narrow, pieces
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["RowExpander"]

_ROWS = 4


class RowExpander(wiring.Component):
    """Expands rows.

    Parameters
    ----------
    width : elements of a group (W), at most as many as 64 bytes of a row have.
    port_bits : of a word, at least 16 · W.
    columns_max : longest row.
    formats : row formats that it knows.

    Members
    -------
    columns, row_format : In.
    i_row : In stream of `row_layout(columns_max)`, o_row : Out stream of the same.
    i_bitmap, i_values, ... : In streams of words, those of RowValues.
    o : Out stream of words.
    idle : Out, every row that was said is on `o_row`.
    """

    def __init__(self, width: int, port_bits: int, columns_max: int, formats: Collection[RowFormat]) -> None:
        self.width, self.port_bits, self.columns_max = width, port_bits, columns_max
        self._values = RowValues(width, port_bits, columns_max, formats)
        #: Sections that it takes.
        self.streams = ("bitmap", *(section.name.lower() for section in self._values.sections))
        row = stream.Signature(row_layout(columns_max))
        super().__init__(
            {
                "columns": In(range(columns_max + 1)),
                "row_format": In(RowFormat),
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
        m.submodules.fork = fork = Fork(row, 3)
        m.submodules.bitmap_queue = queue = StreamQueue(port_bits, self.columns_max // port_bits + 1, memory="block")
        m.submodules.bitmap_groups = groups = Narrow(width, port_bits // width)
        m.submodules.values = values = self._values
        m.submodules.expander = expander = BitmapExpander(width, LANE_BITS)
        m.submodules.pack = pack = Pack(width, port_bits)
        to_bitmap, to_values, out = fork.o
        for source, sink in (
            (wiring.flipped(self.i_row), rows.i),
            (rows.o, fork.i),
            (out, wiring.flipped(self.o_row)),
            (to_values, values.i_row),
            (wiring.flipped(self.i_bitmap), queue.i),
            (queue.o, groups.i),
            *((wiring.flipped(getattr(self, f"i_{name}")), getattr(values, f"i_{name}")) for name in self.streams[1:]),
            (values.o, expander.i_value),
            (pack.o, wiring.flipped(self.o)),
        ):
            wiring.connect(m, source, sink)
        narrow = self.row_format == RowFormat.PLAIN8
        blocks = [pieces(self.columns, SECTION_BYTES // size) * (SECTION_BYTES // size // width) for size in (2, 1)]
        m.d.comb += [
            values.row_format.eq(self.row_format),
            groups.i_count.payload.eq(Mux(narrow, blocks[1], blocks[0])),
            groups.i_count.valid.eq(to_bitmap.valid),
            to_bitmap.ready.eq(groups.i_count.ready),
            expander.i_bitmap.payload.bits.eq(groups.o.payload.data),
            expander.i_bitmap.payload.last.eq(groups.o.payload.last),
            expander.i_bitmap.valid.eq(groups.o.valid),
            groups.o.ready.eq(expander.i_bitmap.ready),
            pack.i.payload.eq(expander.o.payload.data),
            pack.i.valid.eq(expander.o.valid),
            pack.narrow.eq(narrow),
            expander.o.ready.eq(pack.i.ready),
            self.idle.eq(rows.level == 0),
        ]
        return m
