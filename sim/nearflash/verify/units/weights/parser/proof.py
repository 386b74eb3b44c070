"""Proof of the matrix parser, words of 256 bits, of which a block has two.

Counts and checksums are the solver's: any number that a section can have, any checksum. Proven is which words they are
of and when they are looked at; that the counter then has them is proof weights.popcount, whose assumptions are proven
here.
"""

from typing import Any

from amaranth.hdl import Array, Cat, Module, Mux, Signal
from amaranth.lib import wiring

from nearflash.abi.bitmap import SECTION_BYTES, SECTIONS, RowFormat, Section
from nearflash.abi.topk import StreamFault
from nearflash.gateware.weights.matrix import Part
from nearflash.gateware.weights.parser import MatrixParser
from nearflash.gateware.weights.popcount import Counted, Popcount
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer
from nearflash.verify.units.weights.parser.reference import MatrixReference, ParserState

__all__ = ["PROOF", "CountingParser", "build_proof"]

_WORD_BITS, _COLUMNS_MAX = 256, 512
_COUNT_CYCLES = Popcount.latency(_WORD_BITS)


class _Free(wiring.Component):
    """Stands in for a unit; its outputs are the harness's."""

    def __init__(self, unit: Any) -> None:
        self.LATENCY = unit.LATENCY
        super().__init__(unit.signature)

    def elaborate(self, platform: object) -> Module:
        return Module()


class CountingParser(MatrixParser):
    """Parser with stand-ins for the counter and for the checksum."""

    def __init__(self) -> None:
        super().__init__(_WORD_BITS, _COLUMNS_MAX)
        self._ones: Any = _Free(self._ones)
        self._crc: Any = _Free(self._crc)


def build_proof(dut: Any = None) -> ProofHarness:
    """Each word to its section, a row when it is whole; the first fault stands, and the rest is dropped."""
    dut = CountingParser() if dut is None else dut
    harness = ProofHarness(dut)
    offer(harness, dut.i_command, "i_command")
    offer(harness, dut.i)
    outputs = {section: getattr(dut, f"o_{section.name.lower()}") for section in Section}
    for o, name in ((dut.o_row, "o_row"), *((o, f"o_{section.name.lower()}") for section, o in outputs.items())):
        accept(harness, o, name)
        check_source(harness, o, name)
    given, row = dut.i_command.payload, dut.o_row.payload
    harness.assume((given.rows != 0) & (given.columns != 0) & (given.columns <= _COLUMNS_MAX))
    harness.assume(given.row_format < len(RowFormat))
    ref = MatrixReference(harness, dut)
    _counter(harness, dut, ref)

    for section, o in outputs.items():
        name, here = section.name.lower(), (ref.part == section) & (ref.at < ref.useful) & ref.inside
        harness.prove(f"{name}_in_its_place", ~o.valid | (here & dut.i.valid))
        harness.prove(f"{name}_moves_once", moves(o) == (ref.word & here))
        harness.prove(f"{name}_same_words", ~o.valid | (o.payload == dut.i.payload))
    harness.prove("no_word_of_another_command", ~dut.i.ready | (ref.active & (ref.words != 0)))
    harness.prove(
        "a_row_before_its_values", ~dut.o_row.valid | ((ref.part == Part.VALUES) & (ref.at == 0) & ~ref.reported)
    )
    harness.prove("no_values_of_a_row_not_reported", ~ref.word | ~ref.inside | (ref.part != Part.VALUES) | ref.reported)
    harness.prove("a_row_has_its_place", ~dut.o_row.valid | (ref.whole <= ref.words))
    same = (row.escapes == ref.escapes) & (row.codebook == ref.book)
    harness.prove("a_row_says_its_values", ~dut.o_row.valid | ((row.values == ref.values) & (~ref.coded | same)))
    harness.prove("the_first_fault_stands", dut.fault == ref.fault)
    harness.prove("no_row_behind_a_fault", ~dut.o_row.valid | ref.inside)
    harness.prove("next_command_when_idle", dut.i_command.ready == dut.idle)
    harness.prove("idle_when_all_was_taken", ref.active | (ref.words == 0))
    harness.prove("a_fault_or_all_rows", ref.active | ref.over | (ref.command.rows == 0))
    harness.prove("all_rows_and_nothing_else", ~ref.finished | (ref.rows == 0) & (~ref.sound | (ref.words == 0)))
    harness.prove("waits_for_a_word", ~dut.wait | (ref.inside & ~dut.i.valid))
    rests = harness.past(ref.active & ref.over, "over_before") & ref.active
    harness.prove("drops_the_rest", ~rests | (dut.i.ready == (ref.words != 0)))
    harness.no_paths += [(dut.i.valid, dut.i.ready)]
    harness.cover("a_good_matrix", ~ref.active & ref.finished & ref.sound)
    harness.cover("ends_within_a_row", (ref.fault == StreamFault.LENGTH) & (ref.part == Part.VALUES))
    harness.cover("drops_a_word", ref.word & ~ref.sound)
    _ends(harness, dut, ref, outputs.values())
    _invariants(harness, dut, ref)
    return harness


def _counter(harness: ProofHarness, dut: Any, ref: MatrixReference) -> None:
    """It is used as its own proof assumes, and read when it has all words; so is the checksum."""
    ones, rests = ref.ones, Signal(range(_COUNT_CYCLES + 1), reset_less=True)  # cycles since its last word
    harness.m.d.sync += rests.eq(Mux(ones.enable, 0, rests + (rests < _COUNT_CYCLES)))
    threes = Mux(ref.command.row_format == RowFormat.CODED_FP16, Counted.THREES_OF_4, Counted.THREES_OF_2)
    counted = Mux(ref.part == Part.CODES, threes, Counted.ONES)
    count = harness.free(len(ones.count), "count")
    harness.m.d.comb += [ones.count.eq(count), ones.beyond.eq(harness.free(1, "beyond"))]
    fields = (ref.bits, ref.bits >> 2, ref.bits >> 1)
    harness.assume(count <= Array(fields)[counted])

    fresh, settled = Signal(), rests >= _COUNT_CYCLES - 1
    harness.m.d.sync += fresh.eq(ones.begin | (fresh & ~ones.enable))
    harness.prove("counts_each_word", ones.enable == (ref.word & ref.inside & ref.counted))
    harness.prove("counts_what_it_is", ~ones.enable | ((ones.counted == counted) & (ones.word == dut.i.payload)))
    harness.prove("counts_from_rest", ~(ones.begin & ref.counted) | (settled & ~ones.enable & (ones.bits == ref.bits)))
    harness.prove("counts_from_the_first_word", ~ones.enable | (fresh == (ref.at == 0)))
    harness.prove("counts_all_words", ~(ref.ends & ref.counted & (ref.at != 0)) | settled)
    after_reset = Mux(ref.state == ParserState.PLAN, 1, 2)
    least = Mux((ref.part == Part.HEADER) & (ref.state <= ParserState.CHECK), after_reset, _COUNT_CYCLES - 1)
    harness.prove("inner_rests", ~ref.inside | (ref.counted & (ref.at != 0)) | (rests >= least))
    harness.prove(
        "inner_settles", (ref.state != ParserState.SETTLE) | ~ref.counted | (rests + ref.settle >= _COUNT_CYCLES - 1)
    )
    harness.prove("inner_fresh", (ref.state != ParserState.PASS) | ~ref.counted | (fresh == (ref.at == 0)))
    crc = ref.crc
    harness.m.d.comb += crc.o.eq(harness.free(32, "checksum"))
    harness.prove("checksum_of_each_word", crc.enable == (ref.word & ref.inside & (ref.part != Part.END)))
    harness.prove("checksum_of_a_message", ~crc.enable | ((crc.first == ref.message) & (crc.data == dut.i.payload)))


def _ends(harness: ProofHarness, dut: Any, ref: MatrixReference, outputs: Any) -> None:
    """Whoever brings words and takes what is offered sees a word taken before long, or the end."""
    offered = Cat(o.valid & ~o.ready for o in (dut.o_row, *outputs)).any()
    least: dict[int, int] = dict.fromkeys((Part.END, Part.HEADER, Part.CODEBOOK, Part.VALUES), 3)  # cycles to a word
    least |= {Part.ESCAPES: 4 + least[Part.VALUES], Part.SCALES: 4 + least[Part.VALUES]}
    least[Part.CODES] = 4 + least[Part.ESCAPES]
    least[Part.LOW] = 3 + _COUNT_CYCLES + least[Part.CODES]
    least[Part.BITMAP] = 4 + least[Part.LOW]
    longest = 1 + _COUNT_CYCLES + least[Part.BITMAP]
    waits = Signal(range(2 * longest))
    with harness.m.If(~ref.active | ref.word):
        harness.m.d.sync += waits.eq(0)
    with harness.m.Elif(dut.i.valid & ~offered):
        harness.m.d.sync += waits.eq(waits + 1)
    harness.prove("takes_a_word_or_ends", waits < longest)

    behind = Array(least.get(part, 0) for part in range(max(Part) + 1))[ref.part]
    check = 2 + Mux(ref.whole == 0, ref.settles + 1 + behind, 0)
    left: dict[int, Any] = {
        ParserState.PLAN: 1 + check,
        ParserState.CHECK: check,
        ParserState.SETTLE: ref.settle + 1 + behind,
        ParserState.DRAIN: ref.words == 0,
    }
    harness.prove("inner_waits", waits + Array(left.get(state, 0) for state in range(8))[ref.state] < longest)


def _invariants(harness: ProofHarness, dut: Any, ref: MatrixReference) -> None:
    """Assert what the registers inside hold, by what was seen outside."""
    state, part, inside = ref.state, ref.part, ref.inside
    planned = inside & (state != ParserState.PLAN)

    def same(name: str, path: str, signal: Any, when: Any) -> None:
        harness.prove(f"inner_{name}", ~when | (harness.probe(path, len(signal)) == signal))

    harness.prove("inner_idle", (state == ParserState.WAIT) == dut.idle)
    harness.prove("inner_drain", (state == ParserState.DRAIN) == (ref.active & ref.over))
    harness.prove("inner_states", state <= ParserState.SETTLE)
    rest = ref.whole - ref.at
    useful = Mux(ref.at < ref.useful, ref.useful - ref.at, 0)
    taken = Mux(state == ParserState.SETTLE, ref.whole, 0)
    harness.prove("inner_at", ~inside | Mux(state == ParserState.PASS, ref.at < ref.whole, ref.at == taken))
    same("words", "left.words", ref.words, ref.active)
    same("rows", "left.rows", ref.rows, inside)
    in_group = inside & (part != Part.HEADER) & (part != Part.END)
    same("group_rows", "left.group_rows", ref.group_rows, in_group)
    same("group", "group", ref.group, inside)
    same("command", "command", ref.command.as_value(), inside)
    same("part", "part", ref.part, inside)
    same("bits", "bits", ref.bits, planned)
    same("all", "words.all", rest[:6], planned)
    same("useful", "words.useful", useful[:6], planned)
    same("begins", "part_begins", ref.at == 0, planned)
    same("message", "message_begins", ref.message, inside)
    same("first", "first_word", ref.first, planned & (ref.at != 0))
    settle = ref.settle
    harness.prove(
        "inner_settle", ~planned | Mux(state == ParserState.SETTLE, settle <= ref.settles, settle == ref.settles)
    )
    harness.prove("inner_part_of_a_row", ~inside | _follows(ref))
    harness.prove("inner_reported", ~inside | (ref.reported == ((part == Part.VALUES) & (state >= ParserState.PASS))))
    harness.prove("inner_fits", ~(inside & (state >= ParserState.PASS)) | (ref.whole - ref.at <= ref.words))
    harness.prove("inner_command_taken", ~inside | (ref.command.row_format < len(RowFormat)))
    harness.prove("inner_columns", ref.command.columns <= _COLUMNS_MAX)
    harness.prove("inner_some", ~ref.active | (ref.command.columns != 0) & (ref.command.rows != 0))
    harness.prove("inner_some_rows", ~inside | (ref.rows != 0) | (part == Part.END))
    behind_bitmap = in_group & (part != Part.CODEBOOK) & (part != Part.BITMAP)
    same("values", "row.values", ref.values, behind_bitmap)
    harness.prove("inner_count", ~behind_bitmap | (ref.values <= ref.command.columns))
    behind_codes = ref.coded & inside & ((part == Part.ESCAPES) | (part == Part.VALUES))
    same("escapes", "row.escapes", ref.escapes, behind_codes)
    harness.prove("inner_threes", ~behind_codes | (ref.escapes <= ref.values))
    same("book", "row.codebook", ref.book, in_group & ref.coded & (part != Part.CODEBOOK))
    words, block = 8 * SECTION_BYTES // _WORD_BITS, harness.probe("header.block", 8 * SECTION_BYTES)
    for taken in range(1, words + 1):  # shifted in from above
        seen, size = Mux(part == Part.HEADER, ref.at == taken, taken == words), taken * _WORD_BITS
        harness.prove(f"inner_header_{taken}", ~inside | ~seen | (block[-size:] == ref.text.as_value()[:size]))


def _follows(ref: MatrixReference) -> Any:
    """Whether rows of the format have the part."""
    found = [(ref.command.row_format == form) & (ref.part == each) for form in SECTIONS for each in SECTIONS[form]]
    blocks = (ref.part == Part.HEADER) | (ref.part == Part.END) | (ref.coded & (ref.part == Part.CODEBOOK))
    return blocks | Cat(found).any()


PROOF = Proof(build_proof, engine="induction", depth=2, cover_depth=40)
