"""Values of blocks of coded weights: their sections to words of W values, as BitmapExpander takes them.

    i_first, i_second, i_third, i_fourth, i_escapes, i_low, i_middle, i_values ─► queue ─► Unpack ─► LevelValues ─► o

Contract: a block of n values gives ceil(n / W) words. `bf16` and `wide` stand while anything is inside. The queues have
room for a block of `elements_max` values, whatever its codes, that of `i_values`, which comes last, for half of one.
Reset drops what is inside.

Timing: one word a cycle while the sections come; back-pressure: yes. While the second half of a block's values is
expanded, the next block's other sections may come: two blocks' of first codes and of the low and middle plane fit, of
the further levels and of escapes one block's longest.
Numerics: bits are moved as they are; equals nearflash.model.weights.levels.
"""

from typing import Any

from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.coded import CodedSection
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.weights.levels import LevelValues
from nearflash.gateware.weights.matrix import block_layout, queue_words
from nearflash.gateware.weights.unpack import FieldUnpack

__all__ = ["BLOCK_STREAMS", "BlockValues"]

BLOCK_STREAMS = tuple(section.name.lower() for section in CodedSection if section is not CodedSection.BITMAP)
"""Sections that it takes."""
_COUNTS = {"first": "values", "low": "values", "middle": "values", "values": "values", "second": "seconds",
           "third": "thirds", "fourth": "fourths", "escapes": "escapes"}  # fmt: skip
_SIZES: dict[str, tuple[int, ...]] = {"first": (1, 2), "second": (1,), "third": (1, 2), "fourth": (2,), "escapes": (8,),
                                      "low": (1,), "middle": (2,), "values": (8,)}  # fmt: skip
"""Bits of a field; where codes may be `wide`, the second size is theirs."""
_TWICE = ("first", "low", "middle")
"""Sections that take a block's whole time to be read: two blocks' have room."""
_BLOCK_RAM_WORDS = 513
_CODEBOOKS = 2
"""Of blocks whose codes may come while the values of the block before do."""


class BlockValues(wiring.Component):
    """Queues and gearboxes of coded weights.

    Parameters
    ----------
    width : values of a word (W).
    port_bits : of a word of a section.
    elements_max : of a block.

    Members
    -------
    bf16, wide : In, as LevelValues'.
    i_row : In stream of `block_layout(elements_max)`.
    i_first, i_second, ... : In streams of words, of BLOCK_STREAMS.
    o : Out stream of W · 16 bits.
    """

    def __init__(self, width: int, port_bits: int, elements_max: int) -> None:
        self.width, self.port_bits, self.elements_max = width, port_bits, elements_max
        self._unit = LevelValues(width)
        super().__init__(
            {
                "bf16": In(1),
                "wide": In(1),
                "i_row": In(stream.Signature(block_layout(elements_max))),
                **{f"i_{name}": In(stream.Signature(port_bits)) for name in BLOCK_STREAMS},
                "o": Out(self._unit.o.signature),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A queue and a gearbox a section, each with the block's count of its fields."""
        m = Module()
        m.submodules.unit = unit = self._unit
        m.submodules.fork = fork = Fork(self.i_row.payload.shape(), len(BLOCK_STREAMS) + 1)
        m.submodules.codebooks = codebooks = StreamQueue(unit.i_codebook.payload.shape(), _CODEBOOKS)
        wiring.connect(m, wiring.flipped(self.i_row), fork.i)
        wiring.connect(m, codebooks.o, unit.i_codebook)
        wiring.connect(m, unit.o, wiring.flipped(self.o))
        fields = {name: self._section(m, name, row) for name, row in zip(BLOCK_STREAMS, fork.o, strict=False)}
        first, to_codebook = fields.pop("first"), fork.o[-1]
        # A block without values takes no codebook: the next one would get it.
        some = to_codebook.payload.values != 0
        m.d.comb += [
            unit.bf16.eq(self.bf16),
            unit.wide.eq(self.wide),
            codebooks.i.payload.eq(to_codebook.payload.codebook),
            codebooks.i.valid.eq(to_codebook.valid & some),
            to_codebook.ready.eq(codebooks.i.ready | ~some),
            unit.i_first.payload.codes.eq(first.o.payload.data),
            unit.i_first.payload.last.eq(first.o.payload.last),
            unit.i_first.valid.eq(first.o.valid),
            first.o.ready.eq(unit.i_first.ready),
        ]
        names = {"escapes": "escape", "values": "value"}
        for name, unpack in fields.items():
            sink = getattr(unit, f"i_{names.get(name, name)}")
            m.d.comb += [
                sink.payload.eq(unpack.o.payload.data),
                sink.valid.eq(unpack.o.valid),
                unpack.o.ready.eq(sink.ready),
            ]
        return m

    def _section(self, m: Module, name: str, row: Any) -> FieldUnpack:
        """Fields of a section; bf16 has no low and middle plane."""
        sizes, port_bits, longest = _SIZES[name], self.port_bits, self.elements_max
        if name == "values":
            depth = max(_BLOCK_RAM_WORDS, longest // 2 * 8 // port_bits + 1)
        else:
            depth = queue_words(longest if name in _TWICE else longest // 2, max(sizes), port_bits)
        count_bits = longest.bit_length()
        queue = StreamQueue(port_bits, depth, memory="block")
        unpack = FieldUnpack(self.width, port_bits, sizes, lane_bits=max(sizes), count_bits=count_bits)
        m.submodules[f"{name}_queue"], m.submodules[f"{name}_fields"] = queue, unpack
        wiring.connect(m, wiring.flipped(getattr(self, f"i_{name}")), queue.i)
        wiring.connect(m, queue.o, unpack.i)
        absent = self.bf16 if name in ("low", "middle") else 0
        m.d.comb += [
            unpack.size.eq(self.wide if len(sizes) > 1 else 0),
            unpack.i_count.payload.eq(row.payload[_COUNTS[name]]),
            unpack.i_count.valid.eq(row.valid & ~absent),
            row.ready.eq(unpack.i_count.ready | absent),
        ]
        return unpack
