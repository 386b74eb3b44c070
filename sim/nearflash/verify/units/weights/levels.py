"""Values coded in levels: a proof for words of four; vectors of blocks whose codes end in any level, or in escapes.

The proof takes the stages' expanders and the queues as they are proven by themselves (weights.bitmap, stream.queue): it
is about what joins them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from amaranth.hdl import Array, C, Cat, Mux, Signal
from numpy.typing import NDArray

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.coded import CODEBOOK_ENTRIES_MAX, LEVELS, CodedSection, count_entries, level_bits, list_sections
from nearflash.gateware.weights.levels import LevelValues
from nearflash.model.weights.fields import join_fields
from nearflash.model.weights.levels import join_values
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "TARGET", "LevelBlock", "build_proof", "component", "make_block", "vectors", "words_of"]

_WIDTH = 4
_BLOCKS = 110
_SECTIONS = {
    CodedSection.FIRST: ("i_first", 2), CodedSection.SECOND: ("i_second", 1), CodedSection.THIRD: ("i_third", 2),
    CodedSection.FOURTH: ("i_fourth", 2), CodedSection.ESCAPES: ("i_escape", 8), CodedSection.LOW: ("i_low", 1),
    CodedSection.MIDDLE: ("i_middle", 2), CodedSection.VALUES: ("i_value", 8),
}  # fmt: skip
"""Stream of each section, and bits of one of its fields there."""


_INPUTS = ("i_codebook", "i_first", *(name for name, _ in _SECTIONS.values() if name != "i_first"))
_STAGES, _IN_STAGE, _IN_QUEUE = len(LEVELS), 3, 2
_ENTRY_BITS = 4


def build_proof(dut: Any = None) -> ProofHarness:
    """A word for each beat of first codes, with what is beside it: values, a codebook's exponents or escaped ones."""
    dut = LevelValues(_WIDTH) if dut is None else dut
    harness = ProofHarness(dut)
    m = harness.m
    m.d.comb += [getattr(dut, name).eq(harness.free(1, name)) for name in ("bf16", "wide")]
    for name in _INPUTS:
        offer(harness, getattr(dut, name), name)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    most = _STAGES * (_IN_STAGE + _IN_QUEUE) + _IN_QUEUE + 1
    inside, word = Signal(range(most + 2)), moves(dut.i_value)
    m.d.sync += inside.eq(inside + moves(dut.i_first) - moves(dut.o))
    held = Signal(2)  # words of the plane of values that have not left
    m.d.sync += held.eq(held + word - moves(dut.o))
    harness.prove("a_word_for_a_beat", ~dut.o.valid | (inside != 0))
    harness.prove("beats_inside", inside <= most)
    harness.prove("a_word_of_values_for_a_word", held == dut.o.valid)
    harness.prove(
        "a_word_of_each_plane_of_fp16", Cat(moves(dut.i_low), moves(dut.i_middle)) == (word & ~dut.bf16).replicate(2)
    )
    harness.prove("a_codebook_with_a_word_of_values", ~moves(dut.i_codebook) | word)
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    harness.no_paths += [(getattr(dut, name).valid, dut.o.valid) for name in _INPUTS]
    _check_counts(harness, dut, inside)
    _check_words(harness, dut, word)
    return harness


def _check_counts(harness: ProofHarness, dut: Any, inside: Any) -> None:
    """Every beat is in one place; the queue beside a stage has as many as the stage, and room."""
    places = dut.o.valid + _level(harness, "exponents")
    for number in range(_STAGES):
        lanes = f"stage_{number}.lanes"
        beats = sum(harness.probe(f"{lanes}.{name}", 1) for name in ("valid_0", "valid_1", "o__valid"))
        beside = _level(harness, f"stage_{number}.beside", _IN_STAGE + 1)
        harness.prove(f"beside_its_beat_{number}", beside == beats)
        places += beats + _level(harness, f"beats_{number}")
    harness.prove("each_beat_in_one_place", inside == places)


def _level(harness: ProofHarness, queue: str, most: int = _IN_QUEUE) -> Any:
    """Items of a queue, whose flags agree with it."""
    words = harness.probe(f"{queue}.full_words", range(most + 1))
    some, room = harness.probe(f"{queue}.o__valid", 1), harness.probe(f"{queue}.i__ready", 1)
    agree = (words <= most) & (some == (words != 0)) & (room == (words != most))
    harness.prove(f"level_of_{queue.replace('.', '_')}", agree)
    return words


def _check_words(harness: ProofHarness, dut: Any, word: Any) -> None:
    """A word is made of what was taken for it: an entry of the codebook, or 0 behind it, beside an escaped exponent."""
    fields = harness.probe("exponents.o__payload", _WIDTH * (8 + _ENTRY_BITS) + 1)
    book = [dut.i_codebook.payload.word_select(entry, 8) for entry in range(CODEBOOK_ENTRIES_MAX)]
    few = count_entries(1)
    known = Array([Mux(dut.wide | (entry < few), each, 0) for entry, each in enumerate(book)] + [C(0, 8)] * 6)
    values = []
    for lane in range(_WIDTH):
        entry = fields[8 * _WIDTH :].word_select(lane, _ENTRY_BITS)
        exponent = known[entry] | fields.word_select(lane, 8)
        high = dut.i_value.payload.word_select(lane, 8)
        narrow = Cat(
            dut.i_low.payload[lane], dut.i_middle.payload.word_select(lane, 2), high[:7], exponent[:5], high[7]
        )
        values.append(Mux(dut.bf16, Cat(high[:7], exponent, high[7]), narrow))
    made, expected = harness.past(word, "made"), harness.past(Cat(values), "expected")
    harness.prove("a_word_of_what_was_taken", ~made | (dut.o.valid & (dut.o.payload == expected)))
    taken_book = harness.past(moves(dut.i_codebook), "taken_book")
    harness.prove("the_codebook_leaves_with_the_last_word", taken_book == (made & harness.past(fields[-1], "was_last")))
    harness.cover("an_escaped_exponent_leaves", word & (fields[: 8 * _WIDTH] != 0) & fields[-1])


@dataclass(frozen=True)
class LevelBlock:
    """A block's sections, its codebook, and what they expand to."""

    book: bytes
    fields: dict[CodedSection, NDArray[Any]]
    values: NDArray[np.uint16]


def make_block(rng: np.random.Generator, count: int, share: float, code_bits: int, bf16: bool) -> LevelBlock:
    """Random fields of `count` values, of which about such a share of each level has codes of the next."""
    element = ElementFormat.BF16 if bf16 else ElementFormat.FP16
    book, fields, left = rng.bytes(CODEBOOK_ENTRIES_MAX), dict[CodedSection, NDArray[Any]](), count
    for level, bits in zip(LEVELS, level_bits(code_bits), strict=True):
        last = (1 << bits) - 1
        fields[level] = np.where(rng.random(left) < share, last, rng.integers(0, last, left)).astype(np.uint16)
        left = int(np.count_nonzero(fields[level] == last))
    fields[CodedSection.ESCAPES] = rng.integers(0, 256, left, np.uint16)
    for section, bits in list_sections(element, code_bits, False).items():
        if section > CodedSection.ESCAPES:
            fields[section] = rng.integers(0, 1 << bits, count, np.uint16)
    return LevelBlock(book, fields, join_values(fields, list(book[: count_entries(code_bits)]), element, code_bits))


def words_of(block: LevelBlock, width: int) -> dict[str, list[Any]]:
    """Items of the streams of LevelValues."""
    words: dict[str, list[Any]] = {"i_codebook": [int.from_bytes(block.book, "little")]}
    for section, fields in block.fields.items():
        name, bits = _SECTIONS[section]
        padded = np.pad(fields, (0, -fields.size % width))
        words[name] = [int.from_bytes(join_fields(word, bits), "little") for word in padded.reshape(-1, width)]
    last = len(words["i_first"]) - 1
    words["i_first"] = [{"codes": codes, "last": at == last} for at, codes in enumerate(words["i_first"])]
    return words


def component() -> ObservedStreams:
    """The smallest one."""
    return ObservedStreams(LevelValues(_WIDTH))


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Blocks of one to nine whole beats, now and then of many; without planes of fp16 in bf16."""
    bf16, code_bits = bool(rng.integers(2)), int(rng.integers(1, 3))
    streams: dict[str, list[Any]] = {name: [] for name in ("i_codebook", *(name for name, _ in _SECTIONS.values()))}
    values = []
    for _ in range(_BLOCKS):
        beats = int(rng.choice([1, 2, 3, 9, 60], p=[0.3, 0.3, 0.2, 0.17, 0.03]))
        block = make_block(rng, beats * _WIDTH, rng.choice([0, 0.3, 0.6, 0.9, 1]), code_bits, bf16)
        for name, words in words_of(block, _WIDTH).items():
            streams[name].extend(words)
        values.append(block.values)
    streams["i_first"] = [each["codes"] | each["last"] << 2 * _WIDTH for each in streams["i_first"]]
    books = words_from_integers(streams.pop("i_codebook"), 8 * CODEBOOK_ENTRIES_MAX)
    arrays = {name: np.array(words, np.uint64) for name, words in streams.items()}
    places = (16 * np.arange(_WIDTH)).astype(np.uint64)
    expected = (np.concatenate(values).reshape(-1, _WIDTH).astype(np.uint64) << places).sum(axis=1, dtype=np.uint64)
    held = {"bf16": np.array(int(bf16)), "wide": np.array(code_bits - 1)}
    return {"i_codebook": books, **arrays, **held}, {"o": expected}


PROOF = Proof(build_proof, engine="induction", depth=3, cover_depth=26)
TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=12, cut_cycles=(9, 20, 33))
