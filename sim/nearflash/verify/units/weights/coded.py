"""Vectors of the coded values: rows of whole words, in fp16 or in bf16, with no, some or only escapes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import ESCAPE, Section
from nearflash.abi.formats import BF16, FP16
from nearflash.gateware.weights.coded import CodedValues
from nearflash.model.weights.coded import decode
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.target import Target

__all__ = ["TARGET", "component", "vectors"]

_WIDTH = 4
_ROWS = 120
_FIELD_BITS = 4


def component() -> ObservedStreams:
    """The smallest one."""
    return ObservedStreams(CodedValues(_WIDTH))


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Rows of one to nine beats, now and then of many; what is not looked at is anything."""
    number = FP16 if rng.integers(2) else BF16
    streams: dict[str, list[NDArray[Any]]] = {}
    for _ in range(_ROWS):
        beats = int(rng.choice([1, 2, 3, 9, 40], p=[0.3, 0.3, 0.2, 0.18, 0.02]))
        codes = rng.integers(0, 16, beats * _WIDTH, np.uint16)
        share = rng.choice([0, 0.1, 0.5, 1])
        codes = np.where(rng.random(codes.size) < share, codes | ESCAPE, codes & ~(codes >> 1 & 1))
        escapes = np.count_nonzero(codes & ESCAPE == ESCAPE)
        fields = {
            Section.LOW: rng.integers(0, 2, codes.size, np.uint16),
            Section.CODES: codes,
            Section.ESCAPES: rng.integers(0, 256, -(-escapes // _WIDTH) * _WIDTH, np.uint16),
            Section.VALUES: rng.integers(0, 256, codes.size, np.uint16),
        }
        book = rng.integers(0, 256, 3, np.uint8)
        expected = decode(fields | {Section.ESCAPES: fields[Section.ESCAPES][:escapes]}, book.tobytes(), number)
        words = {
            "i_codebook": np.frombuffer(book.tobytes() + b"\0", "<u4"),
            "i_low": _words(fields[Section.LOW], 1)[: beats if number is FP16 else 0],
            "i_code": _words(codes, _FIELD_BITS),
            "i_escape": _words(fields[Section.ESCAPES], 8),
            "i_value": _words(fields[Section.VALUES], 8),
            "o": _words(expected, 16),
        }
        words["i_code"][-1] |= 1 << _FIELD_BITS * _WIDTH
        for name, items in words.items():
            streams.setdefault(name, []).append(items)
    joined: dict[str, NDArray[Any]] = {name: np.concatenate(items) for name, items in streams.items()}
    expected_words = joined.pop("o")
    return joined | {"bf16": np.array(int(number is BF16))}, {"o": expected_words}


def _words(fields: NDArray[Any], bits: int) -> NDArray[np.uint64]:
    """Words of W fields, the first one lowest."""
    places = (bits * np.arange(_WIDTH)).astype(np.uint64)
    words: NDArray[np.uint64] = (fields.reshape(-1, _WIDTH).astype(np.uint64) << places).sum(axis=1, dtype=np.uint64)
    return words


TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=8, cut_cycles=(9, 20, 33))
