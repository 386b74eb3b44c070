"""Matrix parser: takes a bitmap matrix apart, a word of the port a cycle.

    i ─┬─► MatrixHeader, Crc32c, Popcount ─► fault
       ├─► o_bitmap, o_scales, o_low, o_codes, o_escapes, o_values
       └─► o_row, when a row's length is known to be there

Contract: a command takes exactly the words of its bytes. The words of a section go to its stream, but for words of
padding. A row is said on `o_row` before its values go out, and only where its sections lie within the matrix and
its bitmap has no ones beyond the columns; of a row that is not said, words of sections before its values may have gone
out. `fault` is the first one in the order of nearflash.model.weights.bitmap.read_rows, and says no further row; what is
left of the matrix is taken and dropped. It stands until the next command. Reset drops what is inside.

Timing: a word a cycle within a section, PLAN_CYCLES between sections, and behind bitmaps and codes, which are counted,
as many more as Popcount's latency has beyond one; back-pressure: yes.
Limits: rows of up to `columns_max` columns, with every section of a row taken before its values: who takes the streams
has room for a row's.
Source: nearflash.abi.bitmap.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SECTION_BYTES, RowFormat, Section
from nearflash.abi.coded import CODEBOOK_ENTRIES_MAX
from nearflash.abi.crc import CRC_RESIDUE
from nearflash.abi.topk import StreamFault
from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.stream.gearbox import pieces
from nearflash.gateware.weights.matrix import (
    CODED,
    BlockPart,
    MatrixCommand,
    Part,
    block_layout,
    is_levels,
    row_layout,
)
from nearflash.gateware.weights.matrix_header import MatrixHeader
from nearflash.gateware.weights.popcount import Counted, Popcount
from nearflash.gateware.weights.sections import SectionPlan

__all__ = ["MatrixParser"]

_THREES = Counted.THREES_OF_4, Counted.THREES_OF_2
"""In fp16, and in bf16."""
_CODEBOOK_BITS = 8 * CODEBOOK_ENTRIES_MAX
_BLOCK_BITS = 8 * SECTION_BYTES


class MatrixParser(wiring.Component):
    """Takes matrices apart.

    Parameters
    ----------
    port_bits : of a word: 64, 128, 256 or 512.
    columns_max : longest row, a multiple of 512.
    levels : whether it takes coded weights apart, too (nearflash.abi.coded): a block is a row then.

    Members
    -------
    i_command : In stream of MatrixCommand, taken when all words of the one before were.
    i : In stream of words.
    o_row : Out stream of `row_layout(columns_max)`, with `levels` of `block_layout(columns_max)`.
    o_bitmap, o_scales, o_low, o_codes, o_escapes, o_values : Out streams of words; with `levels` also o_first,
        o_second, o_third, o_fourth, o_middle.
    has_bitmap, wide : Out, of coded weights: as MatrixHeader's, from the first row to the end; with `levels` only.
    fault : Out, StreamFault. wait : Out, a word is needed and not there.
    idle : Out, no command is in flight.
    """

    #: Cycles between the last word of a section and the first one of the next.
    PLAN_CYCLES = 3

    def __init__(self, port_bits: int, columns_max: int, levels: bool = False) -> None:
        self.port_bits, self.columns_max, self.levels = port_bits, columns_max, levels
        self._plan = SectionPlan(columns_max, levels)
        #: Parts that have a stream, by its name.
        self.sections = {part.name.lower(): part for part in (*Section, *(BlockPart if levels else ()))}
        layout = block_layout if levels else row_layout
        self._ones, self._crc = Popcount(port_bits, self._plan.bits_max), Crc32c(port_bits)
        super().__init__(
            {
                "i_command": In(stream.Signature(MatrixCommand)),
                "i": In(stream.Signature(port_bits)),
                "o_row": Out(stream.Signature(layout(columns_max))),
                **{f"o_{name}": Out(stream.Signature(port_bits)) for name in self.sections},
                **(dict.fromkeys(("has_bitmap", "wide"), Out(1)) if levels else {}),
                "fault": Out(StreamFault),
                "wait": Out(1),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """States that say what words are; beside them the checks."""
        m = Module()
        m.submodules.plan, m.submodules.ones, m.submodules.crc = plan, ones, crc = self._plan, self._ones, self._crc
        m.submodules.header = header = MatrixHeader(self.port_bits, self.levels)
        now = _Registers(self, plan.bits_max // self.port_bits)
        inside = Signal()  # words are those of a part
        self._look(m, now, header, crc, inside)
        with m.FSM():
            with m.State("WAIT-COMMAND"):
                self._begin(m, now)
            with m.State("PLAN"):
                m.d.sync += [
                    now.bits.eq(plan.bits),
                    now.words.all.eq(pieces(plan.bits, _BLOCK_BITS) << _log2(_BLOCK_BITS // self.port_bits)),
                    now.words.useful.eq(pieces(plan.bits, self.port_bits)),
                    now.part_begins.eq(1),
                    # Only counted parts wait for the counter.
                    now.settle.eq(Mux(self._is_counted(now.part), ones.LATENCY - 1, 0)),
                ]
                m.next = "CHECK"
            with m.State("CHECK"):
                # In every cycle of CHECK: what the counter has of the part before is used by now.
                m.d.comb += ones.begin.eq(1)
                self._check(m, now)
            with m.State("PASS"):
                m.d.comb += inside.eq(1)
                self._route(m, now)
                with m.If(self.i.valid & self.i.ready & (now.words.all == 1)):
                    m.next = "SETTLE"
            with m.State("SETTLE"):
                m.d.sync += now.settle.eq(now.settle - 1)
                with m.If(now.settle == 0):
                    found = self._find_fault(m, now, header, crc)
                    self._advance(m, now, header)
                    m.d.sync += self.fault.eq(found)
                    m.next = "PLAN"
                    with m.If((found != StreamFault.NONE) | ((now.part == Part.END) & (now.left.rows == 0))):
                        m.next = "DRAIN"
            with m.State("DRAIN"):
                # The command's words are taken to the last: the reader has asked for all of them.
                m.d.comb += self.i.ready.eq(now.left.words != 0)
                with m.If(now.left.words == 0):
                    m.next = "WAIT-COMMAND"
        return m

    def _look(self, m: Module, now: "_Registers", header: MatrixHeader, crc: Crc32c, inside: Signal) -> None:
        """Each word to the checks that it is for, and what is left behind it."""
        plan, ones, word, taken = self._plan, self._ones, self.i.payload, Signal()
        m.d.comb += [
            taken.eq(self.i.valid & self.i.ready),
            self.wait.eq(inside & ~self.i.valid),
            header.command.eq(now.command),
            header.intact.eq(crc.o == CRC_RESIDUE),
            header.enable.eq(taken & inside & (now.part == Part.HEADER)),
            header.word.eq(word),
            crc.enable.eq(taken & inside & (now.part != Part.END)),
            crc.first.eq(now.message_begins),
            crc.data.eq(word),
            ones.bits.eq(now.bits),
            ones.counted.eq(self._count_unit(now)),
            ones.enable.eq(taken & inside & self._is_counted(now.part)),
            ones.word.eq(word),
            plan.part.eq(now.part),
            plan.row_format.eq(now.command.row_format),
            plan.columns.eq(now.command.columns),
            plan.values.eq(now.row.values),
            plan.escapes.eq(now.row.escapes),
            self.o_row.payload.eq(now.row),
        ]
        with m.If(taken):
            m.d.sync += [
                now.left.words.eq(now.left.words - 1),
                now.words.all.eq(now.words.all - 1),
                # Stays at 0: padding follows the useful words of a block.
                now.words.useful.eq(now.words.useful - now.words.useful.any()),
                now.part_begins.eq(0),
            ]
        with m.If(taken & now.part_begins):
            m.d.sync += now.first_word.eq(word)
        with m.If(crc.enable):
            m.d.sync += now.message_begins.eq(0)
        if self.levels:
            self._look_at_block(m, now, taken)

    def _look_at_block(self, m: Module, now: "_Registers", taken: Signal) -> None:
        """Lengths of a block's sections, and the second word of its codebook, where one word has not all of it."""
        plan, left = self._plan, now.left.rows
        m.d.sync += now.columns.eq(Mux(left < now.command.columns, left, now.command.columns))
        m.d.comb += [
            plan.columns.eq(Mux(is_levels(now.command.row_format), now.columns, now.command.columns)),
            *(getattr(plan, name).eq(getattr(now.row, name)) for name in ("seconds", "thirds", "fourths")),
            *(port.eq(now.levels[name]) for name in ("has_bitmap", "wide") for port in (getattr(plan, name),
                                                                                       getattr(self, name))),
        ]  # fmt: skip
        with m.If(taken & (now.words.all == _BLOCK_BITS // self.port_bits - 1)):
            m.d.sync += now.second_word.eq(self.i.payload)

    def _begin(self, m: Module, now: "_Registers") -> None:
        """Take a command."""
        given = self.i_command.payload
        m.d.comb += [self.idle.eq(1), self.i_command.ready.eq(1)]
        m.d.sync += [
            now.command.eq(given),
            now.left.words.eq(given.in_bytes >> _log2(self.port_bits // 8)),
            now.left.rows.eq(given.rows),
            now.group.eq(0),
            now.part.eq(Part.HEADER),
            now.message_begins.eq(1),
        ]
        with m.If(self.i_command.valid):
            m.d.sync += self.fault.eq(StreamFault.NONE)
            m.next = "PLAN"

    def _check(self, m: Module, now: "_Registers") -> None:
        """Whether the matrix has the part's words; before values, which are a row's last section, say the row."""
        # Before the part's first word: no unit downstream gets a section that ends early.
        with m.If(now.words.all > now.left.words):
            m.d.sync += self.fault.eq(StreamFault.LENGTH)
            m.next = "DRAIN"
        with m.Else():
            m.d.comb += self.o_row.valid.eq(now.part == Part.VALUES)
            with m.If(self.o_row.ready | ~self.o_row.valid):
                m.next = "PASS"
                with m.If(now.words.all == 0):
                    m.next = "SETTLE"

    def _route(self, m: Module, now: "_Registers") -> None:
        """A word to its section's stream; padding, and blocks that are no sections, to none."""
        m.d.comb += self.i.ready.eq(1)
        with m.Switch(now.part):
            for name, part in self.sections.items():
                o = getattr(self, f"o_{name}")
                m.d.comb += o.payload.eq(self.i.payload)
                with m.Case(part):
                    m.d.comb += o.valid.eq(self.i.valid & now.words.useful.any())
                    # Padding goes nowhere and waits for no one.
                    m.d.comb += self.i.ready.eq(o.ready | ~now.words.useful.any())

    def _find_fault(self, m: Module, now: "_Registers", header: MatrixHeader, crc: Crc32c) -> Signal:
        """Find what is wrong with the part whose words were taken."""
        found = Signal(StreamFault)
        with m.Switch(now.part):
            with m.Case(Part.HEADER):
                m.d.comb += found.eq(header.fault)
            with m.Case(Part.BITMAP):
                m.d.comb += found.eq(Mux(self._ones.beyond, StreamFault.COUNT, StreamFault.NONE))
            with m.Case(Part.END):
                more = now.left.words.any() | now.command.in_bytes[: _log2(SECTION_BYTES)].any()
                m.d.comb += found.eq(Mux((now.left.rows == 0) & more, StreamFault.LENGTH, StreamFault.NONE))
                # The later statement: a wrong checksum wins over a wrong length.
                with m.If(now.first_word[:64] != Cat(now.group, crc.o)):
                    m.d.comb += found.eq(StreamFault.CHECKSUM)
        return found

    def _advance(self, m: Module, now: "_Registers", header: MatrixHeader) -> None:
        """Use the part, and go to the part behind it."""
        left, blocks = now.left, is_levels(now.command.row_format) if self.levels else C(0)
        coded = Cat(now.command.row_format == form for form in CODED).any()
        if self.levels:
            coded = coded | blocks
        m.d.sync += now.part.eq(self._plan.next)
        with m.Switch(now.part):
            with m.Case(Part.HEADER, Part.END):  # a group begins, and with it a message of the checksum
                m.d.sync += [
                    now.part.eq(Mux(coded, Part.CODEBOOK, Part.BITMAP)),
                    now.message_begins.eq(1),
                    left.group_rows.eq(header.group_rows),
                    # The header's own part begins group 0, each END the next one.
                    now.group.eq(now.group + (now.part == Part.END)),
                ]
            with m.Case(Part.CODEBOOK):
                m.d.sync += [now.part.eq(Part.BITMAP), now.row.codebook.eq(now.first_word)]
            with m.Case(Part.BITMAP):
                m.d.sync += now.row.values.eq(self._ones.count)
            with m.Case(Part.CODES):
                m.d.sync += now.row.escapes.eq(self._ones.count)
            with m.Case(Part.VALUES):
                group_ends = (left.rows == 1) | (left.group_rows == 1)
                m.d.sync += [
                    now.part.eq(Mux(group_ends, Part.END, Part.BITMAP)),
                    left.rows.eq(left.rows - 1),
                    left.group_rows.eq(left.group_rows - 1),
                ]
        if self.levels:
            with m.If(blocks):
                self._advance_block(m, now, header)

    def _advance_block(self, m: Module, now: "_Registers", header: MatrixHeader) -> None:
        """Use a part of coded weights where that differs: what is left are elements, taken off behind the bitmap."""
        left, row, count = now.left, now.row, self._ones.count
        with m.Switch(now.part):
            with m.Case(Part.HEADER):
                m.d.sync += [now.levels.has_bitmap.eq(header.has_bitmap), now.levels.wide.eq(header.wide)]
            with m.Case(Part.CODEBOOK):
                m.d.sync += row.codebook.eq(Cat(now.first_word, now.second_word)[:_CODEBOOK_BITS])
            with m.Case(Part.BITMAP):
                m.d.sync += [
                    row.columns.eq(now.columns),
                    row.values.eq(Mux(now.levels.has_bitmap, count, now.columns)),
                    left.rows.eq(left.rows - now.columns),
                ]
            with m.Case(BlockPart.FIRST):
                m.d.sync += row.seconds.eq(count)
            with m.Case(BlockPart.SECOND):
                m.d.sync += row.thirds.eq(count)
            with m.Case(BlockPart.THIRD):
                m.d.sync += row.fourths.eq(count)
            with m.Case(BlockPart.FOURTH):
                m.d.sync += row.escapes.eq(count)
            with m.Case(Part.VALUES):
                group_ends = (left.rows == 0) | (left.group_rows == 1)
                m.d.sync += [now.part.eq(Mux(group_ends, Part.END, Part.BITMAP)), left.rows.eq(left.rows)]

    def _is_counted(self, part: Signal) -> Any:
        counted = (part == Part.BITMAP) | (part == Part.CODES)
        return counted | ((part >= BlockPart.FIRST) & (part <= BlockPart.FOURTH)) if self.levels else counted

    def _count_unit(self, now: "_Registers") -> Any:
        """Unit of what is counted; of codes in levels of one bit, their ones."""
        part, threes = now.part, Mux(now.command.row_format == RowFormat.CODED_FP16, *_THREES)
        unit = Mux(part == Part.CODES, threes, Counted.ONES)
        if not self.levels:
            return unit
        pairs = (part == BlockPart.FOURTH) | (((part == BlockPart.FIRST) | (part == BlockPart.THIRD)) & now.levels.wide)
        return Mux(pairs, Counted.THREES_OF_2, unit)


class _Registers:
    """Position of the parser in a matrix."""

    def __init__(self, parser: MatrixParser, words_max: int) -> None:
        self.command = Signal(MatrixCommand)
        self.left = Signal(data.StructLayout({"words": 32, "rows": 32, "group_rows": 32}))
        """Of the command, and of the group: what is still to come."""
        self.group = Signal(32)
        self.row = Signal(parser.o_row.payload.shape())
        self.part = Signal(Part)
        self.bits = Signal.like(parser._plan.bits)
        """Length of the part."""
        self.words = Signal(data.StructLayout(dict.fromkeys(("all", "useful"), range(words_max + 1))))
        """Of the part, still to come; those that are not padding alone."""
        self.part_begins = Signal()
        """The next word is the first one of the part."""
        self.message_begins = Signal()
        """The next word is the first one of a message of the checksum."""
        self.first_word = Signal(parser.port_bits, reset_less=True)
        """Of the part."""
        self.settle = Signal(range(parser._ones.LATENCY))
        """Cycles until the counter has the part's last word."""
        if parser.levels:
            self.levels = Signal(data.StructLayout({"has_bitmap": 1, "wide": 1}))
            """Of the header."""
            self.columns = Signal(range(parser.columns_max + 1))
            """Elements of the next block."""
            self.second_word = Signal(parser.port_bits, reset_less=True)
            """Of the part."""


def _log2(number: int) -> int:
    return number.bit_length() - 1
