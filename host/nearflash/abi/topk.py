"""Top-K gradients on the wire: what one stream looks like (docs/contracts/gradients.md).

    header, 32 bytes │ tile word │ indices, 16 bits each │ values │ tile word │ indices │ values │ …

All is little endian; each section is padded with zeros to a multiple of 8 bytes.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import CommandError, StreamError
from nearflash.abi.formats import BF16, FP16, FP32, NumberFormat
from nearflash.abi.python310 import Self

__all__ = [
    "FAULT_TEXTS",
    "HEADER_BYTES",
    "INDEX_BYTES",
    "MAGIC",
    "TILE_BITS",
    "TILE_PARAMS",
    "VERSION",
    "WORD_BYTES",
    "StreamFault",
    "StreamHeader",
    "ValueFormat",
    "check_tiles",
    "longest_stream_bytes",
    "pack_tile_word",
    "pad_bytes",
    "stream_error",
    "tile_crc_prefix",
    "unpack_tile_word",
]

MAGIC = b"NFTK"
VERSION = 1
TILE_BITS = 12
TILE_PARAMS = 1 << TILE_BITS
"""Parameters of a tile; the last one of a stream may have fewer."""
HEADER_BYTES = 32
WORD_BYTES = 8
"""Sections begin at multiples of this."""
INDEX_BYTES = 2

_HEADER = struct.Struct("<4sHBBIIIII")
_TILE = struct.Struct("<HHI")
_TILE_PREFIX = struct.Struct("<IHH")


class ValueFormat(IntEnum):
    """Number format of a stream's values."""

    FP32 = 0
    FP16 = 1
    BF16 = 2

    @property
    def number_format(self) -> NumberFormat:
        """The format itself."""
        return (FP32, FP16, BF16)[self]


class StreamFault(IntEnum):
    """Error of a stream: the first fault in stream order, and within a tile the first in this order."""

    NONE = 0
    HEADER = 1
    """Magic, version, value format, tile size or number of parameters are not those expected."""
    LENGTH = 2
    """The stream ends early or late, or its pairs are not as many as its header states."""
    COUNT = 3
    """A tile has more pairs than parameters."""
    CHECKSUM = 4
    """CRC32C of the header or of a tile: damaged, or tiles out of order."""
    ORDER = 5
    """An index is not greater than the one before it."""
    RANGE = 6
    """An index lies beyond the parameters."""


FAULT_TEXTS = {
    StreamFault.HEADER: "must begin with the header of a Top-K stream of as many parameters as the command has",
    StreamFault.LENGTH: "must end where its header states, with as many pairs",
    StreamFault.COUNT: f"must have at most {TILE_PARAMS} pairs in a tile",
    StreamFault.CHECKSUM: "must have the CRC32C that is written in it",
    StreamFault.ORDER: "must have ascending indices in a tile",
    StreamFault.RANGE: "must have no index beyond its parameters",
}


def stream_error(fault: StreamFault, detail: str) -> StreamError:
    """The error for a fault; `detail` states where, or what was found instead."""
    text = FAULT_TEXTS[fault]
    return StreamError(f"a gradient stream {text}, not {detail}; compress the gradients again", fault)


def pad_bytes(count: int, element_bytes: int) -> int:
    """Bytes of a section of `count` elements."""
    return -(-count * element_bytes // WORD_BYTES) * WORD_BYTES


def longest_stream_bytes(params: int, pairs: int, value_format: ValueFormat) -> int:
    """Most bytes that a stream of `pairs` pairs for `params` parameters has."""
    tile_bytes = WORD_BYTES + 2 * (WORD_BYTES - INDEX_BYTES)  # the word, and padding of two sections
    tiles = -(-params // TILE_PARAMS)
    return pad_bytes(HEADER_BYTES + tiles * tile_bytes + pairs * (INDEX_BYTES + value_format.number_format.bytes), 1)


def pack_tile_word(count: int, crc: int) -> bytes:
    """The word before a tile's sections."""
    return _TILE.pack(count, 0, crc)


def unpack_tile_word(word: bytes | memoryview) -> tuple[int, int]:
    """Count and CRC32C of a tile word."""
    count, _, crc = _TILE.unpack(word)
    return count, crc


def check_tiles(stream: memoryview, header: "StreamHeader") -> None:
    """Compare the tiles' words with the stream's header, so that none is of another stream: a kernel compares each
    tile's pairs with its word. For streams that were not packed in this process. Raises StreamError.
    """
    words, at, value_bytes = [], HEADER_BYTES, header.value_format.number_format.bytes
    for tile in range(header.tiles):
        if at + WORD_BYTES > header.stream_bytes:
            raise stream_error(StreamFault.LENGTH, f"before tile {tile}")
        words.append(bytes(stream[at : at + WORD_BYTES]))
        count, _ = unpack_tile_word(words[-1])
        at += WORD_BYTES + pad_bytes(count, INDEX_BYTES) + pad_bytes(count, value_bytes)
    if at != header.stream_bytes or crc32c(b"".join(words)) != header.tiles_crc32c:
        raise stream_error(StreamFault.CHECKSUM, "words of tiles that its header does not state")


def tile_crc_prefix(tile: int, word: bytes) -> bytes:
    """Bytes that the CRC32C of tile `tile` covers before its sections: the number, then the count with its padding."""
    return _TILE_PREFIX.pack(tile, *_TILE.unpack(word)[:2])


@dataclass(frozen=True)
class StreamHeader:
    """Header of a stream of `pairs` pairs for `params` parameters, `stream_bytes` long with the header."""

    value_format: ValueFormat
    params: int
    pairs: int
    stream_bytes: int
    tiles_crc32c: int = 0
    """CRC32C of all tiles' words, in order: no kernel looks at it, `check_tiles` does."""

    def __post_init__(self) -> None:
        if not 0 < self.params < 1 << 32:
            raise CommandError(f"params must be between 1 and 2^32 - 1, not {self.params!r}")
        if not 0 <= self.stream_bytes < 1 << 32:
            raise CommandError(f"a stream must be shorter than 4 GiB, not {self.stream_bytes!r} bytes; split it")

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.params // TILE_PARAMS)

    def pack(self) -> bytes:
        """The header's 32 bytes."""
        fields = (self.params, self.tiles, self.pairs, self.stream_bytes, self.tiles_crc32c)
        text = _HEADER.pack(MAGIC, VERSION, self.value_format, TILE_BITS, *fields)
        return text + crc32c(text).to_bytes(4, "little")

    @classmethod
    def unpack(cls, text: bytes, params: int, stream_bytes: int) -> Self:
        """Header of a stream of `params` parameters and `stream_bytes` bytes. Raises StreamError for any other."""
        if min(len(text), stream_bytes) < HEADER_BYTES:
            raise stream_error(StreamFault.LENGTH, f"after {min(len(text), stream_bytes)} bytes")
        magic, version, number, tile_bits, *fields = _HEADER.unpack(text[: _HEADER.size])
        if magic != MAGIC or version != VERSION:
            raise stream_error(StreamFault.HEADER, f"magic {magic!r} and version {version}")
        if crc32c(text[: _HEADER.size]) != int.from_bytes(text[_HEADER.size : HEADER_BYTES], "little"):
            raise stream_error(StreamFault.CHECKSUM, "another one in its header")
        if number >= len(ValueFormat) or (tile_bits, *fields[:2]) != (TILE_BITS, params, -(-params // TILE_PARAMS)):
            stated = f"format {number}, 2^{tile_bits} parameters a tile, {fields[0]} parameters in {fields[1]} tiles"
            raise stream_error(StreamFault.HEADER, stated)
        if fields[3] != stream_bytes or stream_bytes % WORD_BYTES:
            raise stream_error(StreamFault.LENGTH, f"{stream_bytes} bytes where {fields[3]} are stated")
        return cls(ValueFormat(number), params, fields[2], stream_bytes, fields[4])
