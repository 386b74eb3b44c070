"""Sections of a row: how long each part of a matrix is, and which section comes after which.

Contract: combinational. Parts that are single blocks have the bits of one.
Source: nearflash.abi.bitmap.SECTIONS.
"""

from typing import Any

from amaranth import C, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SCALE_COLUMNS, SECTION_BYTES, SECTIONS, RowFormat, Section
from nearflash.gateware.stream.gearbox import pieces
from nearflash.gateware.weights.matrix import Part

__all__ = ["SectionPlan"]


class SectionPlan(wiring.Component):
    """Lengths and order of parts.

    Parameters
    ----------
    columns_max : longest row.

    Members
    -------
    part, row_format : In. columns, values, escapes : In, of the row.
    bits : Out, length of the part, without padding. next : Out, the row's section behind it.
    """

    def __init__(self, columns_max: int) -> None:
        self.columns_max = columns_max
        #: Longest part.
        self.bits_max = max(16 * columns_max, 8 * SECTION_BYTES)
        super().__init__(
            {
                "part": In(Part),
                "row_format": In(RowFormat),
                **{name: In(range(columns_max + 1)) for name in ("columns", "values", "escapes")},
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
        return m

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
