"""A level of codes: fields of a section to the lanes that a mask names, beside what the level before made of them.

    i ──┬─► BitmapExpander ─┬─► o
        └─► queue ──────────┘

Contract: a beat out for each beat in, in order: each lane of the mask takes the next field, the others have 0, and
`beside` stays with its beat. A beat with `last` ends a block; what is left of the word of fields that it took from is
dropped, so that each block's fields begin with a word. Reset drops what is inside.

Timing: latency LATENCY cycles from a beat, VALUE_LATENCY from a word of fields where that comes later; one beat a
cycle, and one cycle more for a block whose last beat takes from two words; back-pressure: yes. o.valid comes from a
register; i.ready depends on o.ready.
"""

from amaranth import Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.weights.bitmap import BitmapExpander

__all__ = ["LevelStage"]


class LevelStage(wiring.Component):
    """Deals fields.

    Parameters
    ----------
    width : lanes of a beat (W), a power of two from 4 to 64.
    field_bits : 1, 2 or 8.
    beside_bits : of what passes beside.

    Members
    -------
    i : In stream of struct {mask: W, beside, last: 1}.
    i_field : In stream of W fields, the first one lowest.
    o : Out stream of struct {fields: W fields, beside, last: 1}.

    Raises
    ------
    ValueError : another `width` or `field_bits`.
    """

    #: Cycles from a beat on `i` to `o`.
    LATENCY = BitmapExpander.LATENCY
    #: Cycles from a word on `i_field` to `o`.
    VALUE_LATENCY = BitmapExpander.VALUE_LATENCY

    def __init__(self, width: int, field_bits: int, beside_bits: int) -> None:
        self._lanes = BitmapExpander(width, field_bits)
        super().__init__(
            {
                "i": In(stream.Signature(data.StructLayout({"mask": width, "beside": beside_bits, "last": 1}))),
                "i_field": In(stream.Signature(width * field_bits)),
                "o": Out(
                    stream.Signature(
                        data.StructLayout({"fields": width * field_bits, "beside": beside_bits, "last": 1})
                    )
                ),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The queue holds what is beside the beats in the expander, at most its LATENCY: it is never full."""
        m = Module()
        m.submodules.lanes = lanes = self._lanes
        m.submodules.beside = beside = StreamQueue(self.i.payload.beside.shape(), lanes.LATENCY + 1)
        wiring.connect(m, wiring.flipped(self.i_field), lanes.i_value)
        m.d.comb += [
            lanes.i_bitmap.payload.bits.eq(self.i.payload.mask),
            lanes.i_bitmap.payload.last.eq(self.i.payload.last),
            lanes.i_bitmap.valid.eq(self.i.valid),
            self.i.ready.eq(lanes.i_bitmap.ready),
            beside.i.payload.eq(self.i.payload.beside),
            beside.i.valid.eq(self.i.valid & lanes.i_bitmap.ready),
            self.o.payload.fields.eq(lanes.o.payload.data),
            self.o.payload.last.eq(lanes.o.payload.last),
            self.o.payload.beside.eq(beside.o.payload),
            self.o.valid.eq(lanes.o.valid),
            lanes.o.ready.eq(self.o.ready),
            beside.o.ready.eq(self.o.ready & lanes.o.valid),
        ]
        return m
