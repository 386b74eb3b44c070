"""Delta of a step, found, written and read by compiled passes, merged by NumPy.

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
from nearflash.abi.topk import HEADER_BYTES, TILE_PARAMS, WORD_BYTES, StreamFault, ValueFormat
from nearflash.support.native import find_address, load_library

__all__ = ["Changes", "changes_of", "delta_of", "merge_changes"]


@dataclass(frozen=True, eq=False)
class Changes:
    """New words (n,), uint16 or uint32, at ascending int64 indices (n,)."""

    indices: NDArray[np.int64]
    words: NDArray[Any]


class _Walk(ctypes.Structure):
    """`Walk` of delta.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("fault", "tile", "count", "detail", "at", "words")),
        ("heads_crc", ctypes.c_uint32),
    )

    def check(self, header: DeltaHeader) -> None:
        """Raise StreamError unless all tiles are there, and are those of the header."""
        fault, params = StreamFault(self.fault), min(TILE_PARAMS, header.params - self.tile * TILE_PARAMS)
        where = "before" if self.at + WORD_BYTES > header.size_bytes else "within"
        details = {
            StreamFault.LENGTH: f"its end {where} tile {self.tile}",
            StreamFault.COUNT: f"{self.count} words and flags {self.detail} in tile {self.tile}",
            StreamFault.CHECKSUM: f"another checksum in tile {self.tile}",
            StreamFault.ORDER: f"indices that do not ascend in tile {self.tile}",
            StreamFault.RANGE: f"index {self.detail} in tile {self.tile} of {params} parameters",
        }
        if fault:
            raise delta_error(fault, details[fault])
        if (self.at, self.words, self.heads_crc) != (header.size_bytes, header.words, header.tiles_crc32c):
            raise delta_error(StreamFault.LENGTH, f"{self.words} words in {self.at} bytes, or tiles of another delta")


def delta_of(old: NDArray[Any], new: NDArray[Any], value_format: ValueFormat) -> NDArray[np.uint8]:
    """The delta from words (n,) to words (n,): contiguous, uint16 or uint32 as the format has them, n at least 1."""
    value_bytes = value_format.number_format.bytes
    words = np.zeros(1, np.int64)
    # Pages of it that nothing is written to are none of the machine's memory.
    memory = np.empty(longest_delta_bytes(new.size, value_bytes), np.uint8)
    loops = _load()
    write = loops.write_delta16 if value_bytes == 2 else loops.write_delta32
    tiles = memory[HEADER_BYTES:]
    size = write(find_address(old), find_address(new), new.size, find_address(tiles), find_address(words))
    crc = loops.crc_of_heads(find_address(tiles), -(-new.size // TILE_PARAMS), value_bytes)
    header = DeltaHeader(value_format, new.size, int(words[0]), HEADER_BYTES + size, crc)
    memory[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return memory[: HEADER_BYTES + size].copy()


def changes_of(delta: NDArray[np.uint8]) -> Changes:
    """Read what a delta, contiguous, changes: of dense tiles all words. Raises StreamError."""
    header = DeltaHeader.unpack(delta[:HEADER_BYTES].tobytes(), delta.size)
    value_bytes = header.value_format.number_format.bytes
    room = min(header.words, delta.size // value_bytes)
    changes, walk = Changes(np.empty(room, np.int64), np.empty(room, f"<u{value_bytes}")), _Walk()
    read = _load().read_changes16 if value_bytes == 2 else _load().read_changes32
    places = find_address(changes.indices), find_address(changes.words)
    read(find_address(delta), HEADER_BYTES, delta.size, header.params, room, *places, ctypes.byref(walk))
    walk.check(header)
    return changes


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
        function.argtypes, function.restype = [address, address, whole, address, address], whole
    for function in (loops.read_changes16, loops.read_changes32):
        function.argtypes, function.restype = [address, *[whole] * 4, *[address] * 3], None
    loops.crc_of_heads.argtypes, loops.crc_of_heads.restype = [address, whole, whole], ctypes.c_uint32
    return loops
