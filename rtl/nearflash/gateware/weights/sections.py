"""Sections of a row: how long each part of a matrix is, and which section comes after which.

Contract: combinational. Parts that are single blocks have the bits of one.
Source: nearflash.abi.bitmap.SECTIONS.
"""

from typing import Any

from amaranth import C, Module, Mux
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SCALE_COLUMNS, SECTION_BYTES, SECTIONS, RowFormat, Section
from nearflash.abi.coded import CodedSection, LevelFormat
from nearflash.gateware.stream.gearbox import pieces
from nearflash.gateware.weights.matrix import BLOCK_PARTS, Part, is_levels

__all__ = ["SectionPlan"]


class SectionPlan(wiring.Component):
    """Lengths and order of parts.

    Parameters
    ----------
    columns_max : longest row.
    levels : whether it knows the blocks of coded weights, too.

    Members
    -------
    part, row_format : In. columns, values, escapes : In, of the row.
    has_bitmap, wide : In; seconds, thirds, fourths : In, of the block, with `levels` only.
    bits : Out, length of the part, without padding. next : Out, the row's section behind it.
    """

    def __init__(self, columns_max: int, levels: bool = False) -> None:
        self.columns_max, self.levels = columns_max, levels
        #: Longest part.
        self.bits_max = max(16 * columns_max, 8 * SECTION_BYTES)
        counts = ("columns", "values", "escapes", *(("seconds", "thirds", "fourths") if levels else ()))
        super().__init__(
            {
                "part": In(Part),
                "row_format": In(RowFormat),
                **{name: In(range(columns_max + 1)) for name in counts},
                **(dict.fromkeys(("has_bitmap", "wide"), In(1)) if levels else {}),
                "bits": Out(range(self.bits_max + 1)),
                "next": Out(Part),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Fields of a power of two of bits: a length is a shift."""
        m = Module()
        fields = {
            Section.BITMAP: self.columns,
            Section.SCALES: pieces(self.columns, SCALE_COLUMNS),
            Section.ESCAPES: self.escapes,
        }
        m.d.comb += self.bits.eq(C(8 * SECTION_BYTES))
        with m.Switch(self.part):
            for section in Section:
                with m.Case(section):
                    self._section(m, section, fields.get(section, self.values))
        if self.levels:
            with m.If(is_levels(self.row_format)):
                self._blocks(m)
        return m

    def _blocks(self, m: Module) -> None:
        """Sections of a block; those that its format lacks have no bits."""
        narrow = self.row_format == LevelFormat.LEVELS_FP16
        bits = {
            CodedSection.BITMAP: Mux(self.has_bitmap, self.columns, 0),
            CodedSection.FIRST: self.values << self.wide,
            CodedSection.SECOND: self.seconds,
            CodedSection.THIRD: self.thirds << self.wide,
            CodedSection.FOURTH: self.fourths << 1,
            CodedSection.ESCAPES: self.escapes << 3,
            CodedSection.LOW: Mux(narrow, self.values, 0),
            CodedSection.MIDDLE: Mux(narrow, self.values << 1, 0),
            CodedSection.VALUES: self.values << 3,
        }
        later = [*BLOCK_PARTS.values(), Part.END][1:]
        with m.Switch(self.part):
            for (section, part), behind in zip(BLOCK_PARTS.items(), later, strict=True):
                with m.Case(part):
                    m.d.comb += [self.bits.eq(bits[section]), self.next.eq(behind)]

    def _section(self, m: Module, section: Section, fields: Any) -> None:
        """Choose the fields of each format that has the section."""
        with m.Switch(self.row_format):
            for form in RowFormat:
                sections = list(SECTIONS[form])
                if section not in sections:
                    continue
                later = sections[sections.index(section) + 1 :]
                with m.Case(form):
                    m.d.comb += self.bits.eq(fields << (SECTIONS[form][section].bit_length() - 1))
                    m.d.comb += self.next.eq(later[0] if later else Part.END)
