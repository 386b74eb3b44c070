"""Vectors of values coded in levels: blocks of values whose codes end in the first level, in any, or in escapes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.coded import CODEBOOK_ENTRIES_MAX, LEVELS, CodedSection, count_entries, level_bits, list_sections
from nearflash.gateware.weights.levels import LevelValues
from nearflash.model.weights.fields import join_fields
from nearflash.model.weights.levels import join_values
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.target import Target

__all__ = ["TARGET", "LevelBlock", "component", "make_block", "vectors", "words_of"]

_WIDTH = 4
_BLOCKS = 110
_SECTIONS = {
    CodedSection.FIRST: ("i_first", 2), CodedSection.SECOND: ("i_second", 1), CodedSection.THIRD: ("i_third", 2),
    CodedSection.FOURTH: ("i_fourth", 2), CodedSection.ESCAPES: ("i_escape", 8), CodedSection.LOW: ("i_low", 1),
    CodedSection.MIDDLE: ("i_middle", 2), CodedSection.VALUES: ("i_value", 8),
}  # fmt: skip
"""Stream of each section, and bits of one of its fields there."""


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


TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=12, cut_cycles=(9, 20, 33))
