"""Delta of a step, found, written and read by compiled passes, merged by NumPy; Top-K streams, read.

Format and faults: nearflash.abi.delta. Equals nearflash.model.gradients.delta.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.delta import DeltaHeader, delta_error, longest_delta_bytes
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.topk import (
    HEADER_BYTES,
    TILE_PARAMS,
    WORD_BYTES,
    StreamFault,
    StreamHeader,
    ValueFormat,
    stream_error,
)
from nearflash.support.native import find_address, load_library

__all__ = [
    "Changes",
    "Tiles",
    "apply_delta",
    "changes_of",
    "delta_of",
    "expand_stream",
    "merge_changes",
    "round_words",
    "tiles_of",
    "write_delta",
]


@dataclass(frozen=True, eq=False)
class Changes:
    """New words (n,), uint16 or uint32, at ascending int64 indices (n,)."""

    indices: NDArray[np.int64]
    words: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Tiles:
    """Some tiles of a delta, uint8, and the number of the words in them."""

    tiles: NDArray[np.uint8]
    words: int


class _Walk(ctypes.Structure):
    """`Walk` of delta.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("fault", "tile", "count", "detail", "at", "words")),
        ("heads_crc", ctypes.c_uint32),
    )

    def check(self, header: DeltaHeader | StreamHeader, size_bytes: int, words: int) -> None:
        """Raise StreamError unless all tiles are there, so many words in a stream of so many bytes."""
        make = delta_error if isinstance(header, DeltaHeader) else stream_error
        fault, params = StreamFault(self.fault), min(TILE_PARAMS, header.params - self.tile * TILE_PARAMS)
        where = "before" if self.at + WORD_BYTES > size_bytes else "within"
        details = {
            StreamFault.LENGTH: f"its end {where} tile {self.tile}",
            StreamFault.COUNT: f"{self.count} words and flags {self.detail} in tile {self.tile}",
            StreamFault.CHECKSUM: f"another checksum in tile {self.tile}",
            StreamFault.ORDER: f"indices that do not ascend in tile {self.tile}",
            StreamFault.RANGE: f"index {self.detail} in tile {self.tile} of {params} parameters",
        }
        if fault:
            raise make(fault, details[fault])
        other = isinstance(header, DeltaHeader) and self.heads_crc != header.tiles_crc32c
        if other or (self.at, self.words) != (size_bytes, words):
            raise make(StreamFault.LENGTH, f"{self.words} words in {self.at} bytes, or tiles of another one")


def delta_of(old: NDArray[Any], new: NDArray[Any], value_format: ValueFormat) -> NDArray[np.uint8]:
    """The delta from words (n,) to words (n,): contiguous, uint16 or uint32 as the format has them, n at least 1."""
    part = tiles_of(old, new)
    delta = np.empty(HEADER_BYTES + part.tiles.size, np.uint8)
    write_delta([part], new.size, value_format, delta)
    return delta


def tiles_of(old: NDArray[Any], new: NDArray[Any], first_tile: int = 0) -> Tiles:
    """The tiles, from number `first_tile` on, of the delta from words (n,) to words (n,), as in `delta_of`."""
    words = np.zeros(1, np.int64)
    # Pages of it that nothing is written to are none of the machine's memory.
    memory = np.empty(longest_delta_bytes(new.size, new.itemsize), np.uint8)
    write = _load().write_delta16 if new.itemsize == 2 else _load().write_delta32
    places = find_address(old), find_address(new)
    size = write(*places, new.size, first_tile, find_address(memory), find_address(words))
    return Tiles(memory[:size], int(words[0]))


def write_delta(parts: Sequence[Tiles], params: int, value_format: ValueFormat, out: NDArray[np.uint8]) -> int:
    """Write the delta of `params` parameters, whose tiles the parts have in order, to where `out` begins; its bytes."""
    end = HEADER_BYTES
    for part in parts:
        out[end : end + part.tiles.size] = part.tiles
        end += part.tiles.size
    value_bytes = value_format.number_format.bytes
    crc = _load().crc_of_heads(find_address(out[HEADER_BYTES:]), -(-params // TILE_PARAMS), value_bytes)
    header = DeltaHeader(value_format, params, sum(part.words for part in parts), end, crc)
    out[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return end


def round_words(numbers: NDArray[np.float32], copy: CopyFormat) -> NDArray[np.uint16]:
    """Low-precision copies of numbers (n,), contiguous, as an update makes them."""
    words = np.empty(numbers.size, np.uint16)
    _load().round_words(find_address(numbers), numbers.size, copy is CopyFormat.FP16, find_address(words))
    return words


def apply_delta(delta: NDArray[np.uint8], pieces: Sequence[tuple[int, int, int]]) -> None:
    """Make words of 16 bits those after a delta, contiguous. Raises StreamError, and the words are of no use then.

    pieces: ascending and apart, each the first of its parameters, the address of its words, and their number; what
    changes in none of them is left out.
    """
    header = DeltaHeader.unpack(delta[:HEADER_BYTES].tobytes(), delta.size)
    if header.value_format.number_format.bytes != 2 or max((f + n for f, _, n in pieces), default=0) > header.params:
        raise delta_error(StreamFault.HEADER, f"{header.params} parameters in {header.value_format.name}")
    walk, table = _Walk(), np.array(pieces, np.int64).reshape(-1, 3)
    places = find_address(table), len(table), ctypes.byref(walk)
    _load().apply_delta16(find_address(delta), HEADER_BYTES, delta.size, header.params, *places)
    walk.check(header, header.size_bytes, header.words)


def changes_of(delta: NDArray[np.uint8]) -> Changes:
    """Read what a delta, contiguous, changes: of dense tiles all words. Raises StreamError."""
    header = DeltaHeader.unpack(delta[:HEADER_BYTES].tobytes(), delta.size)
    value_bytes = header.value_format.number_format.bytes
    room = min(header.words, delta.size // value_bytes)
    changes, walk = Changes(np.empty(room, np.int64), np.empty(room, f"<u{value_bytes}")), _Walk()
    read = _load().read_changes16 if value_bytes == 2 else _load().read_changes32
    places = find_address(changes.indices), find_address(changes.words)
    read(find_address(delta), HEADER_BYTES, delta.size, header.params, room, *places, ctypes.byref(walk))
    walk.check(header, header.size_bytes, header.words)
    return changes


def expand_stream(stream: NDArray[np.uint8], header: StreamHeader) -> NDArray[np.float32]:
    """Dense gradients of a Top-K stream, contiguous, whose header this is. Raises StreamError."""
    out, walk = np.empty(header.params, np.float32), _Walk()
    places = find_address(out), ctypes.byref(walk)
    _load().expand_stream(find_address(stream), HEADER_BYTES, stream.size, header.params, header.value_format, *places)
    walk.check(header, stream.size, header.pairs)
    return out


def merge_changes(steps: Sequence[Changes]) -> Changes:
    """Merge what steps, at least one, change, in their order: of each word the last value counts."""
    if len(steps) == 1:
        return steps[0]
    indices = np.concatenate([changes.indices for changes in steps])
    words = np.concatenate([changes.words for changes in steps])
    # np.unique finds the first of equal ones: the last, in reverse.
    found, first = np.unique(indices[::-1], return_index=True)
    return Changes(found, words[::-1][first])


@cache
def _load() -> ctypes.CDLL:
    loops = load_library(Path(__file__).with_name("delta.cpp"))
    address, whole = ctypes.c_void_p, ctypes.c_int64
    for function in (loops.write_delta16, loops.write_delta32):
        function.argtypes, function.restype = [address, address, whole, whole, address, address], whole
    loops.round_words.argtypes, loops.round_words.restype = [address, whole, ctypes.c_int32, address], None
    loops.expand_stream.argtypes = [address, *[whole] * 3, ctypes.c_int32, address, address]
    loops.expand_stream.restype = None
    loops.apply_delta16.argtypes, loops.apply_delta16.restype = [address, *[whole] * 3, address, whole, address], None
    for function in (loops.read_changes16, loops.read_changes32):
        function.argtypes, function.restype = [address, *[whole] * 4, *[address] * 3], None
    loops.crc_of_heads.argtypes, loops.crc_of_heads.restype = [address, whole, whole], ctypes.c_uint32
    return loops
