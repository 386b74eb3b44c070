"""Position of a parser in its matrix: a reference for proofs, by the words that moved and when a part was over."""

from enum import IntEnum
from itertools import pairwise
from typing import Any

from amaranth.hdl import Cat, Const, Mux, Signal
from amaranth.lib import data

from nearflash.abi.bitmap import MAGIC, SCALE_COLUMNS, SECTION_BYTES, SECTIONS, VERSION, Section
from nearflash.abi.crc import CRC_RESIDUE
from nearflash.abi.topk import StreamFault
from nearflash.gateware.weights.matrix import CODED, MatrixCommand, Part
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.properties import moves

__all__ = ["MatrixReference", "ParserState"]

_BLOCK_BITS = 8 * SECTION_BYTES
_HEADER = data.StructLayout(
    {
        "magic": 32, "version": 16, "element": 8, "coding": 8, "rows": 32, "columns": 32, "group_rows": 32,
        "scale_columns": 16, "output": 8, "zero": 8, "stream_bytes": 64, "padding": 224, "crc": 32,
    }
)  # fmt: skip


class ParserState(IntEnum):
    """The parser's, as Amaranth numbers them."""

    WAIT = 0
    PLAN = 1
    CHECK = 2
    DRAIN = 3
    PASS = 4
    SETTLE = 5


class MatrixReference:
    """Rest of a command, of its group and its part, what they stated, and what is wrong.

    Of the parser it looks at no more than when a part begins and ends: parts without words are not seen outside.
    """

    def __init__(self, harness: ProofHarness, dut: Any) -> None:
        m, self.port_bits = harness.m, dut.port_bits
        self.state, self.settle = harness.probe("fsm_state", 3), harness.probe("settle", 2)
        self.ones, self.crc, self.word = dut._ones, dut._crc, moves(dut.i)
        self.command, self.words, self.rows = Signal(MatrixCommand), Signal(32), Signal(32)
        self.part, self.at = Signal(Part), Signal(9)  # words taken of the part
        self.text, self.first, self.message = Signal(_HEADER), Signal(self.port_bits), Signal()
        self.group, self.group_rows = Signal(32), Signal(32)
        self.values, self.escapes, self.book = Signal(10), Signal(10), Signal(24)
        self.reported, self.finished, self.fault = Signal(), Signal(), Signal(StreamFault)
        self.active, self.sound = ~dut.idle, self.fault == StreamFault.NONE
        self.over = self.finished | ~self.sound
        self.inside = self.active & ~self.over
        self.coded = Cat(self.command.row_format == form for form in CODED).any()
        self.counted = (self.part == Part.BITMAP) | (self.part == Part.CODES)
        self.settles = Mux(self.counted, self.ones.LATENCY - 1, 0)
        self.ends = (self.state == ParserState.SETTLE) & (self.settle == 0)
        self._lengths(m)
        self._take(m, dut)
        self._end_part(m)
        with m.If(moves(dut.i_command)):
            given = dut.i_command.payload
            m.d.sync += [
                self.command.eq(given),
                self.words.eq(given.in_bytes >> (self.port_bits // 8).bit_length() - 1),
                self.rows.eq(given.rows),
                self.part.eq(Part.HEADER),
                self.message.eq(1),
                self.fault.eq(StreamFault.NONE),
                *(signal.eq(0) for signal in (self.at, self.group, self.reported, self.finished)),
            ]

    def _lengths(self, m: Any) -> None:
        """Bits of the part; words that hold them, and with padding."""
        self.bits, self.useful, self.whole = Signal(14), Signal(9), Signal(9)
        fields = {
            Section.BITMAP: self.command.columns,
            Section.SCALES: (self.command.columns + (SCALE_COLUMNS - 1)) // SCALE_COLUMNS,
            Section.ESCAPES: self.escapes,
        }
        m.d.comb += self.bits.eq(_BLOCK_BITS)
        for form, sections in SECTIONS.items():
            for section, bits in sections.items():
                with m.If((self.command.row_format == form) & (self.part == section)):
                    m.d.comb += self.bits.eq(fields.get(section, self.values) * bits)
        m.d.comb += [
            self.useful.eq((self.bits + (self.port_bits - 1)) // self.port_bits),
            self.whole.eq((self.bits + (_BLOCK_BITS - 1)) // _BLOCK_BITS * (_BLOCK_BITS // self.port_bits)),
        ]

    def _take(self, m: Any, dut: Any) -> None:
        """Take each word's changes; a row that is reported; a part that the matrix has no words for."""
        taken = self.word & ~self.over
        m.d.sync += [self.words.eq(self.words - self.word), self.at.eq(self.at + taken)]
        with m.If(taken & (self.at == 0)):
            m.d.sync += self.first.eq(dut.i.payload)
        with m.If(taken & (self.part == Part.HEADER)):
            m.d.sync += self.text.as_value().word_select(self.at[:1], self.port_bits).eq(dut.i.payload)
        with m.If(taken & (self.part != Part.END)):
            m.d.sync += self.message.eq(0)
        with m.If(moves(dut.o_row)):
            m.d.sync += self.reported.eq(1)
        with m.If((self.state == ParserState.CHECK) & (self.whole > self.words)):
            m.d.sync += self.fault.eq(StreamFault.LENGTH)

    def _end_part(self, m: Any) -> None:
        """Check the part, note what it states, and continue with the next one."""
        group_ends = (self.rows == 1) | (self.group_rows == 1)
        follows = Signal(Part)
        m.d.comb += follows.eq(Part.BITMAP)
        with m.If(self.coded & ((self.part == Part.HEADER) | (self.part == Part.END))):
            m.d.comb += follows.eq(Part.CODEBOOK)
        with m.If((self.part == Part.VALUES) & group_ends):
            m.d.comb += follows.eq(Part.END)
        for form, sections in SECTIONS.items():
            for section, following in pairwise(sections):
                with m.If((self.command.row_format == form) & (self.part == section)):
                    m.d.comb += follows.eq(following)
        with m.If(self.ends):
            m.d.sync += [self.part.eq(follows), self.at.eq(0), self.reported.eq(0), self.fault.eq(self._verdict(m))]
            with m.If((self.part == Part.HEADER) | (self.part == Part.END)):
                m.d.sync += [self.message.eq(1), self.group_rows.eq(self.text.group_rows)]
            with m.If(self.part == Part.END):
                m.d.sync += [self.group.eq(self.group + 1), self.finished.eq(self.rows == 0)]
            with m.If(self.part == Part.CODEBOOK):
                m.d.sync += self.book.eq(self.first)
            with m.If(self.part == Part.BITMAP):
                m.d.sync += self.values.eq(self.ones.count)
            with m.If(self.part == Part.CODES):
                m.d.sync += self.escapes.eq(self.ones.count)
            with m.If(self.part == Part.VALUES):
                m.d.sync += [self.rows.eq(self.rows - 1), self.group_rows.eq(self.group_rows - 1)]

    def _verdict(self, m: Any) -> Any:
        """The first fault of a part, in their order."""
        stated, command, part, verdict = self.text, self.command, self.part, Signal(StreamFault)
        same = [(stated[name], command[name]) for name in ("rows", "columns")]
        same += [(stated[name], command.stated[name]) for name in ("element", "coding", "output")]
        same += [(stated.scale_columns, Mux(command.stated.output != 0, SCALE_COLUMNS, 0))]
        shape = Cat(a != b for a, b in same).any() | (stated.group_rows == 0)
        magic = Cat(stated.magic, stated.version) != Cat(Const(int.from_bytes(MAGIC, "little"), 32), Const(VERSION, 16))
        more = (self.words != 0) | (command.in_bytes % SECTION_BYTES != 0)
        for where, wrong, kind in (
            (Part.HEADER, stated.stream_bytes != command.in_bytes, StreamFault.LENGTH),
            (Part.HEADER, shape, StreamFault.HEADER),
            (Part.HEADER, self.crc.o != CRC_RESIDUE, StreamFault.CHECKSUM),
            (Part.HEADER, magic, StreamFault.HEADER),
            (Part.BITMAP, self.ones.beyond, StreamFault.COUNT),
            (Part.END, (self.rows == 0) & more, StreamFault.LENGTH),
            (Part.END, self.first[:64] != Cat(self.group, self.crc.o), StreamFault.CHECKSUM),
        ):
            with m.If((part == where) & wrong):
                m.d.comb += verdict.eq(kind)
        return verdict
