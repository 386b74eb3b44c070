"""Header check of bitmap matrices and coded weights: a block of 64 bytes against the command.

Contract: takes the block's words, the lowest first; `fault` then says what is wrong with it, whatever came before.
Reset is not needed.

Timing: `fault` and `group_rows` are new LATENCY cycle after the last word; back-pressure: none.
Source: nearflash.abi.bitmap.BitmapHeader, nearflash.abi.coded.CodedHeader.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import HEADER_BYTES, MAGIC, SCALE_COLUMNS, VERSION
from nearflash.abi.coded import CODED_MAGIC, CODED_VERSION
from nearflash.abi.topk import StreamFault
from nearflash.gateware.weights.matrix import MatrixCommand, is_levels

__all__ = ["MatrixHeader"]

_BITS = 8 * HEADER_BYTES
_FIELDS = data.StructLayout(
    {
        "magic": 32, "version": 16, "element": 8, "coding": 8, "rows": 32, "columns": 32, "group_rows": 32,
        "scale_columns": 16, "output": 8, "zero": 8, "stream_bytes": 64, "padding": 224, "crc": 32,
    }
)  # fmt: skip
_CODED_FIELDS = data.StructLayout(
    {
        "magic": 32, "version": 16, "element": 8, "code_bits": 8, "has_bitmap": 8, "zero": 24, "block_elements": 32,
        "group_blocks": 32, "elements": 64, "stream_bytes": 64, "padding": 192, "crc": 32,
    }
)  # fmt: skip


class MatrixHeader(wiring.Component):
    """Collects a header and compares it.

    Parameters
    ----------
    port_bits : of a word: 64 to 512.
    levels : whether it knows coded weights, too.

    Members
    -------
    command : In, stands while `fault` is looked at.
    enable, word : In, a word of the header.
    intact : In, whether the header's checksum is right.
    fault : Out, StreamFault.
    group_rows : Out, rows of a group, or blocks.
    has_bitmap, wide : Out, of coded weights: whether blocks have a bitmap, and codes of two bits; with `levels` only.
    """

    #: Cycles from the last word to the outputs.
    LATENCY = 1

    def __init__(self, port_bits: int, levels: bool = False) -> None:
        self.port_bits, self.levels = port_bits, levels
        super().__init__(
            {
                "command": In(MatrixCommand),
                "enable": In(1),
                "word": In(port_bits),
                "intact": In(1),
                "fault": Out(StreamFault),
                "group_rows": Out(32),
                **(dict.fromkeys(("has_bitmap", "wide"), Out(1)) if levels else {}),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Words are shifted in, so that the first one ends up lowest; the later a fault stands here, the more it is."""
        m = Module()
        block = Signal(_BITS, reset_less=True)
        with m.If(self.enable):
            m.d.sync += block.eq(Cat(block, self.word)[self.port_bits :])
        found, expected = data.View(_FIELDS, block), self.command
        scale_columns = Mux(expected.stated.output != 0, SCALE_COLUMNS, 0)
        length, shape, misdirected = Signal(), Signal(), Signal()
        m.d.comb += [
            length.eq(found.stream_bytes != expected.in_bytes),
            shape.eq(
                Cat(
                    found.element != expected.stated.element,
                    found.coding != expected.stated.coding,
                    found.output != expected.stated.output,
                    found.scale_columns != scale_columns,
                    found.rows != expected.rows,
                    found.columns != expected.columns,
                    found.group_rows == 0,
                ).any()
            ),
            misdirected.eq((found.magic != int.from_bytes(MAGIC, "little")) | (found.version != VERSION)),
            self.group_rows.eq(found.group_rows),
        ]
        for wrong, fault in (
            (length, StreamFault.LENGTH),
            (shape, StreamFault.HEADER),
            (~self.intact, StreamFault.CHECKSUM),
            (misdirected, StreamFault.HEADER),
        ):
            with m.If(wrong):
                m.d.comb += self.fault.eq(fault)
        if self.levels:
            self._look_at_coded(m, data.View(_CODED_FIELDS, block))
        return m

    def _look_at_coded(self, m: Module, found: Any) -> None:
        """Check the header of coded weights, in the order of CodedHeader.unpack; then that it is the one expected."""
        expected = self.command
        known, length, other, misdirected = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            misdirected.eq((found.magic != int.from_bytes(CODED_MAGIC, "little")) | (found.version != CODED_VERSION)),
            known.eq(
                ((found.element == 1) | (found.element == 2))
                & ((found.code_bits == 1) | (found.code_bits == 2))
                & (found.has_bitmap < 2)
                & (found.block_elements != 0)
                & (found.group_blocks != 0)
            ),
            length.eq((found.stream_bytes != expected.in_bytes) | (found.elements == 0)
                      | (found.elements > Cat(C(0, 3), expected.in_bytes))),
            other.eq((found.element != expected.stated.element) | (found.elements != expected.rows)
                     | (found.block_elements != expected.columns)),
        ]  # fmt: skip
        with m.If(is_levels(expected.row_format)):
            m.d.comb += [
                self.group_rows.eq(found.group_blocks),
                self.has_bitmap.eq(found.has_bitmap[0]),
                self.wide.eq(found.code_bits[1]),
                self.fault.eq(StreamFault.NONE),
            ]
            for wrong, fault in (
                (other, StreamFault.HEADER),
                (length, StreamFault.LENGTH),
                (~known, StreamFault.HEADER),
                (~self.intact, StreamFault.CHECKSUM),
                (misdirected, StreamFault.HEADER),
            ):
                with m.If(wrong):
                    m.d.comb += self.fault.eq(fault)
