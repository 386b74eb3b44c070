"""Delta of a step on the wire: which words of a range of parameters have new values (docs/contracts/gradients.md).

Laid out as Top-K gradients are (nearflash.abi.topk), under a magic of its own, with words for values. A tile of which
more than a quarter changes is dense: a bit of its word states that, it has no indices, and its values are all words.
"""

import struct
from dataclasses import dataclass

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import CommandError, StreamError
from nearflash.abi.python310 import Self
from nearflash.abi.topk import HEADER_BYTES, TILE_BITS, TILE_PARAMS, WORD_BYTES, StreamFault, ValueFormat, pad_bytes

__all__ = [
    "DENSE",
    "DENSE_ABOVE",
    "DeltaHeader",
    "delta_error",
    "is_dense",
    "longest_delta_bytes",
    "tile_bytes",
]

MAGIC = b"NFDL"
VERSION = 1
DENSE = 1
"""In the second half of a tile word's first four bytes, which Top-K tiles have as zero: the tile is dense."""
DENSE_ABOVE = 4
"""A tile is dense where more than one of so many of its words changes."""

_HEADER = struct.Struct("<4sHBBIIIII")


def is_dense(changed: int, params: int) -> bool:
    """Whether a tile of `params` parameters of which `changed` have new words is written dense."""
    return changed * DENSE_ABOVE > params


def tile_bytes(count: int, value_bytes: int, *, dense: bool) -> int:
    """Bytes of a tile with its word: `count` indices and words, or words alone."""
    return WORD_BYTES + pad_bytes(0 if dense else count, 2) + pad_bytes(count, value_bytes)


def longest_delta_bytes(params: int, value_bytes: int) -> int:
    """Most bytes that the delta of so many parameters has: all dense."""
    tiles = -(-params // TILE_PARAMS)
    return HEADER_BYTES + tiles * WORD_BYTES + pad_bytes(params, value_bytes)


def delta_error(fault: StreamFault, detail: str) -> StreamError:
    """The error for a fault; `detail` states where, or what was found instead."""
    return StreamError(f"a delta must be as its header and checksums state, not with {detail}; publish it again", fault)


@dataclass(frozen=True)
class DeltaHeader:
    """Header of a delta of `params` parameters: `words` values in `size_bytes` bytes, with the header."""

    value_format: ValueFormat
    params: int
    words: int
    size_bytes: int
    tiles_crc32c: int
    """CRC32C of all tiles' words, in order."""

    def __post_init__(self) -> None:
        if not 0 < self.params < 1 << 32 or not self.size_bytes < 1 << 32:
            raise CommandError(
                f"a delta must be of 1 to 2^32 - 1 parameters and below 4 GiB, not of {self.params} in "
                f"{self.size_bytes} bytes; split the range"
            )

    def pack(self) -> bytes:
        """The header's 32 bytes."""
        fields = (self.params, -(-self.params // TILE_PARAMS), self.words, self.size_bytes, self.tiles_crc32c)
        text = _HEADER.pack(MAGIC, VERSION, self.value_format, TILE_BITS, *fields)
        return text + crc32c(text).to_bytes(4, "little")

    @staticmethod
    def size_in(text: bytes) -> int:
        """Bytes of the delta that these, its first 32, begin: to fetch what `unpack` then checks."""
        return int.from_bytes(text[20:24], "little")

    @classmethod
    def unpack(cls, text: bytes, size_bytes: int) -> Self:
        """Header of a delta of so many bytes. Raises StreamError for anything else."""
        if min(len(text), size_bytes) < HEADER_BYTES:
            raise delta_error(StreamFault.LENGTH, f"{min(len(text), size_bytes)} bytes")
        magic, version, number, tile_bits, params, tiles, words, stated, tiles_crc = _HEADER.unpack(text[:28])
        if (magic, version) != (MAGIC, VERSION):
            raise delta_error(StreamFault.HEADER, f"magic {magic!r} and version {version}")
        if crc32c(text[:28]) != int.from_bytes(text[28:HEADER_BYTES], "little"):
            raise delta_error(StreamFault.CHECKSUM, "another checksum in its header")
        if number >= len(ValueFormat) or tile_bits != TILE_BITS or not params or tiles != -(-params // TILE_PARAMS):
            raise delta_error(StreamFault.HEADER, f"format {number}, {params} parameters in {tiles} tiles")
        if stated != size_bytes:
            raise delta_error(StreamFault.LENGTH, f"{size_bytes} bytes where {stated} are stated")
        return cls(ValueFormat(number), params, words, stated, tiles_crc)
