"""Delta of a step, one tile and one word at a time: the reference for the host's and the gateware's delta.

Format and faults: nearflash.abi.delta.
"""

from collections.abc import Sequence

from nearflash.abi.crc import crc32c
from nearflash.abi.delta import DENSE, DeltaHeader, delta_error, is_dense
from nearflash.abi.topk import (
    HEADER_BYTES,
    TILE_PARAMS,
    WORD_BYTES,
    StreamFault,
    ValueFormat,
    pad_bytes,
    tile_crc_prefix,
)

__all__ = ["apply_delta", "changes_of", "delta_of", "merge_deltas", "pack_changes"]


def delta_of(old: Sequence[int], new: Sequence[int], value_format: ValueFormat) -> bytes:
    """The delta from words (n,) to words (n,): a word that differs in any bit has changed, -0 from 0, too."""
    pairs = zip(old, new, strict=True)
    return pack_changes({i: after for i, (before, after) in enumerate(pairs) if before != after}, new, value_format)


def pack_changes(changes: dict[int, int], words: Sequence[int], value_format: ValueFormat) -> bytes:
    """The delta of changes by index; `words`: all new words (n,), from which dense tiles are filled."""
    value_bytes, params = value_format.number_format.bytes, len(words)
    tiles, total = [], 0
    for first in range(0, params, TILE_PARAMS):
        here = range(first, min(first + TILE_PARAMS, params))
        local = [i - first for i in here if i in changes]
        if dense := is_dense(len(local), len(here)):
            indices, values = b"", [words[i] for i in here]
        else:
            indices, values = b"".join(i.to_bytes(2, "little") for i in local), [changes[first + i] for i in local]
        data = b"".join(value.to_bytes(value_bytes, "little") for value in values)
        sections = _pad(indices) + _pad(data)
        head = len(values).to_bytes(2, "little") + (DENSE if dense else 0).to_bytes(2, "little")
        crc = crc32c(tile_crc_prefix(first // TILE_PARAMS, head + bytes(4)) + sections)
        tiles.append(head + crc.to_bytes(4, "little") + sections)
        total += len(values)
    body, heads = b"".join(tiles), b"".join(tile[:WORD_BYTES] for tile in tiles)
    return DeltaHeader(value_format, params, total, HEADER_BYTES + len(body), crc32c(heads)).pack() + body


def changes_of(delta: bytes) -> dict[int, int]:
    """New words by index, ascending: of dense tiles all of them. Raises StreamError."""
    header = DeltaHeader.unpack(delta[:HEADER_BYTES], len(delta))
    value_bytes = header.value_format.number_format.bytes
    changes: dict[int, int] = {}
    at, heads = HEADER_BYTES, b""
    for tile, first in enumerate(range(0, header.params, TILE_PARAMS)):
        params = min(TILE_PARAMS, header.params - first)
        head = delta[at : at + WORD_BYTES]
        if len(head) < WORD_BYTES:
            raise delta_error(StreamFault.LENGTH, f"its end before tile {tile}")
        count, flags = int.from_bytes(head[:2], "little"), int.from_bytes(head[2:4], "little")
        if count > params or flags > DENSE or (flags and count != params):
            raise delta_error(StreamFault.COUNT, f"{count} words and flags {flags} in tile {tile}")
        values_at = at + WORD_BYTES + (0 if flags else pad_bytes(count, 2))
        end = values_at + pad_bytes(count, value_bytes)
        if end > len(delta):
            raise delta_error(StreamFault.LENGTH, f"its end within tile {tile}")
        if crc32c(tile_crc_prefix(tile, head) + delta[at + WORD_BYTES : end]) != int.from_bytes(head[4:], "little"):
            raise delta_error(StreamFault.CHECKSUM, f"another checksum in tile {tile}")
        before = -1
        for number in range(count):
            place = at + WORD_BYTES + 2 * number
            local = number if flags else int.from_bytes(delta[place : place + 2], "little")
            if local <= before:
                raise delta_error(StreamFault.ORDER, f"{local} behind {before} in tile {tile}")
            if local >= params:
                raise delta_error(StreamFault.RANGE, f"index {local} in tile {tile} of {params} parameters")
            word_at = values_at + number * value_bytes
            changes[first + local] = int.from_bytes(delta[word_at : word_at + value_bytes], "little")
            before = local
        at, heads = end, heads + head
    if (at, len(changes), crc32c(heads)) != (len(delta), header.words, header.tiles_crc32c):
        raise delta_error(StreamFault.LENGTH, f"{len(changes)} words in {at} bytes, or tiles of another delta")
    return changes


def apply_delta(delta: bytes, old: Sequence[int]) -> list[int]:
    """The new words (n,) from the old ones. Raises StreamError, also for another number of words."""
    changes, new = changes_of(delta), list(old)
    header = DeltaHeader.unpack(delta[:HEADER_BYTES], len(delta))
    if header.params != len(new):
        raise delta_error(StreamFault.HEADER, f"{header.params} parameters for {len(new)}")
    for index, word in changes.items():
        new[index] = word
    return new


def merge_deltas(deltas: Sequence[bytes]) -> dict[int, int]:
    """New words by index, ascending, after deltas in order: of each word the last value."""
    merged: dict[int, int] = {}
    for delta in deltas:
        merged |= changes_of(delta)
    return dict(sorted(merged.items()))


def _pad(section: bytes) -> bytes:
    return section.ljust(pad_bytes(len(section), 1), b"\0")
