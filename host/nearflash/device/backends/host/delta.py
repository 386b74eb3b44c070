"""Delta of a step, found and written by a compiled pass, read and merged by NumPy.

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

from nearflash.abi.delta import DENSE, DeltaHeader, delta_error, longest_delta_bytes
from nearflash.abi.topk import (
    HEADER_BYTES,
    TILE_PARAMS,
    WORD_BYTES,
    StreamFault,
    ValueFormat,
    pad_bytes,
    tile_crc_prefix,
)
from nearflash.device.backends.host.topk import find_crc32c
from nearflash.support.native import find_address, load_library

__all__ = ["Changes", "changes_of", "delta_of", "merge_changes"]


@dataclass(frozen=True, eq=False)
class Changes:
    """New words (n,), uint16 or uint32, at ascending int64 indices (n,)."""

    indices: NDArray[np.int64]
    words: NDArray[Any]


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
    """Read what a delta changes: of dense tiles all words. Raises StreamError."""
    header = DeltaHeader.unpack(delta[:HEADER_BYTES].tobytes(), delta.size)
    value_bytes = header.value_format.number_format.bytes
    crc32c = find_crc32c()
    indices, words, heads = [], [], []
    text, at, crc = delta.data, HEADER_BYTES, 0
    for tile, first in enumerate(range(0, header.params, TILE_PARAMS)):
        params = min(TILE_PARAMS, header.params - first)
        head = bytes(text[at : at + WORD_BYTES])
        count, dense, values_at, end = _measure(head, tile, params, at, value_bytes, delta.size)
        crc = crc32c(text[at + WORD_BYTES : end], crc32c(tile_crc_prefix(tile, head)))
        if crc != int.from_bytes(head[4:], "little"):
            raise delta_error(StreamFault.CHECKSUM, f"another checksum in tile {tile}")
        if count:
            local = np.arange(count) if dense else delta[at + WORD_BYTES :][: 2 * count].view("<u2").astype(np.int64)
            if (np.diff(local) <= 0).any():
                raise delta_error(StreamFault.ORDER, f"indices that do not ascend in tile {tile}")
            if local[-1] >= params:
                raise delta_error(StreamFault.RANGE, f"index {local[-1]} in tile {tile} of {params} parameters")
            indices.append(local + first)
            words.append(delta[values_at:][: count * value_bytes].view(f"<u{value_bytes}"))
        heads.append(head)
        at = end
    found = sum(map(len, indices))
    if (at, found, crc32c(b"".join(heads))) != (delta.size, header.words, header.tiles_crc32c):
        raise delta_error(StreamFault.LENGTH, f"{found} words in {at} bytes, or tiles of another delta")
    if not indices:
        return Changes(np.empty(0, np.int64), np.empty(0, f"<u{value_bytes}"))
    return Changes(np.concatenate(indices), np.concatenate(words))


def merge_changes(steps: Sequence[Changes]) -> Changes:
    """Merge what steps, at least one, change, in their order: of each word the last value counts."""
    if len(steps) == 1:
        return steps[0]
    indices = np.concatenate([changes.indices for changes in steps])
    words = np.concatenate([changes.words for changes in steps])
    # np.unique finds the first of equal ones: the last, in reverse.
    found, first = np.unique(indices[::-1], return_index=True)
    return Changes(found, words[::-1][first])


def _measure(head: bytes, tile: int, params: int, at: int, value_bytes: int, size: int) -> tuple[int, bool, int, int]:
    """Count, denseness, and where the values of a tile begin and end. Raises StreamError."""
    if len(head) < WORD_BYTES:
        raise delta_error(StreamFault.LENGTH, f"its end before tile {tile}")
    count, flags = int.from_bytes(head[:2], "little"), int.from_bytes(head[2:4], "little")
    if count > params or flags > DENSE or (flags and count != params):
        raise delta_error(StreamFault.COUNT, f"{count} words and flags {flags} in tile {tile}")
    values_at = at + WORD_BYTES + (0 if flags else pad_bytes(count, 2))
    end = values_at + pad_bytes(count, value_bytes)
    if end > size:
        raise delta_error(StreamFault.LENGTH, f"its end within tile {tile}")
    return count, bool(flags), values_at, end


@cache
def _load() -> ctypes.CDLL:
    loops = load_library(Path(__file__).with_name("delta.cpp"))
    address, whole = ctypes.c_void_p, ctypes.c_int64
    for function in (loops.write_delta16, loops.write_delta32):
        function.argtypes, function.restype = [address, address, whole, address, address], whole
    loops.crc_of_heads.argtypes, loops.crc_of_heads.restype = [address, whole, whole], ctypes.c_uint32
    return loops
