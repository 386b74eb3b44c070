"""Top-K gradient streams for tests and benches: random ones, and one for each way to be wrong."""

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.crc import crc32c
from nearflash.abi.topk import (
    HEADER_BYTES,
    TILE_PARAMS,
    WORD_BYTES,
    StreamFault,
    StreamHeader,
    ValueFormat,
    pack_tile_word,
    tile_crc_prefix,
)
from nearflash.model.expand.topk import pack

__all__ = ["BadStream", "bad_streams", "random_pairs", "random_stream"]


class BadStream(NamedTuple):
    """A stream that an expander of `params` parameters must refuse with `fault`."""

    stream: bytes
    params: int
    fault: StreamFault


def random_pairs(
    rng: np.random.Generator, params: int, density: float, value_format: ValueFormat
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Ascending indices, each of the `params` with chance `density`, and random bit patterns, NaN and the like too."""
    indices = np.flatnonzero(rng.random(params) < density)
    return indices, rng.integers(0, 1 << value_format.number_format.bits, len(indices), dtype=np.uint32)


def random_stream(rng: np.random.Generator, params: int, density: float, value_format: ValueFormat) -> bytes:
    """A whole stream of `random_pairs`."""
    return pack(*random_pairs(rng, params, density, value_format), params, value_format)


def bad_streams() -> dict[str, BadStream]:
    """By name: a stream of two tiles, 5,000 parameters and pairs of fp16, wrong in one place."""
    params = TILE_PARAMS + 904
    indices = np.array([0, 5, 6, 4000, 4095, 4096, 4099, 4100, 4101, 4200, 4999])
    good = pack(indices, np.arange(11, dtype=np.uint32), params, ValueFormat.FP16)
    second = HEADER_BYTES + 5 * WORD_BYTES  # the second tile's word; 5 pairs take two words of each section

    def bad(fault: StreamFault, stream: bytes, params: int = params) -> BadStream:
        return BadStream(stream, params, fault)

    def header(**changes: Any) -> bytes:
        fields = {"value_format": ValueFormat.FP16, "params": params, "pairs": 11, "stream_bytes": len(good)}
        return StreamHeader(**{**fields, **changes}).pack() + good[HEADER_BYTES:]

    def patched(at: int, text: bytes) -> bytes:
        return good[:at] + text + good[at + len(text) :]

    def sealed(*, number: int = 1, **words: list[int]) -> bytes:
        """The second tile with other indices, its checksum right for tile `number`."""
        local = words.get("indices", [0, 3, 4, 5, 104, 903])
        sections = struct.pack("<8H", *local, 0, 0) + good[second + 3 * WORD_BYTES :]
        crc = crc32c(tile_crc_prefix(number, pack_tile_word(6, 0)) + sections)
        return good[:second] + pack_tile_word(6, crc) + sections

    other_header = struct.pack("<4sHBBIIIII", b"NFTK", 1, 3, 12, params, 2, 11, len(good), 0)
    return {
        "empty": bad(StreamFault.LENGTH, b""),
        "header only half": bad(StreamFault.LENGTH, good[:16]),
        "magic": bad(StreamFault.HEADER, patched(0, b"NFTL")),
        "version": bad(StreamFault.HEADER, patched(4, b"\2")),
        "header damaged": bad(StreamFault.CHECKSUM, patched(24, b"\1")),
        "value format": bad(StreamFault.HEADER, other_header + crc32c(other_header).to_bytes(4, "little") + good[32:]),
        "other params": bad(StreamFault.HEADER, good, params + 1),
        "fewer params": bad(StreamFault.HEADER, good, params - 1),
        "ends within a tile": bad(StreamFault.LENGTH, header(stream_bytes=len(good) - 8)[:-8]),
        "ends before a tile": bad(StreamFault.LENGTH, header(stream_bytes=second)[:second]),
        "cut": bad(StreamFault.LENGTH, good[:-8]),
        "longer than it says": bad(StreamFault.LENGTH, good + bytes(8)),
        "longer than its tiles": bad(StreamFault.LENGTH, header(stream_bytes=len(good) + 8) + bytes(8)),
        "other number of pairs": bad(StreamFault.LENGTH, header(pairs=12)),
        "count": bad(StreamFault.COUNT, patched(second, (TILE_PARAMS + 1).to_bytes(2, "little"))),
        "count that is less": bad(StreamFault.CHECKSUM, patched(second, b"\5")),
        "what fills up a count": bad(StreamFault.CHECKSUM, patched(second + 2, b"\1")),
        "index damaged": bad(StreamFault.CHECKSUM, patched(second + 8, b"\1")),
        "value damaged": bad(StreamFault.CHECKSUM, patched(len(good) - 5, b"\1")),
        "first tile damaged": bad(StreamFault.CHECKSUM, patched(HEADER_BYTES + 9, b"\1")),
        "tile out of place": bad(StreamFault.CHECKSUM, sealed(number=2)),
        "index twice": bad(StreamFault.ORDER, sealed(indices=[0, 3, 3, 5, 104, 903])),
        "descending indices": bad(StreamFault.ORDER, sealed(indices=[0, 3, 5, 4, 104, 903])),
        "descending across words": bad(StreamFault.ORDER, sealed(indices=[0, 3, 4, 105, 104, 903])),
        "index beyond params": bad(StreamFault.RANGE, sealed(indices=[0, 3, 4, 5, 104, 904])),
        "index beyond the tile": bad(StreamFault.RANGE, sealed(indices=[0, 3, 4, 5, 104, 0xFFFF])),
        "order before range": bad(StreamFault.ORDER, sealed(indices=[0, 3, 4, 4, 104, 904])),
    }
