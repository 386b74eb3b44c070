"""Bytes coded by rANS: what the dense elements of 8 bits (fp8, int8) become, losslessly.

    header, 64 bytes │ group: frequencies │ block │ block: … │ end of the group │ group: …

A block is of up to `block_elements` elements of the flattened tensor, in LANES lanes: element k is of lane k mod LANES,
which has a state of its own. A state's lowest PRECISION_BITS bits are a slot; each value of a byte has as many slots as
its frequency states. A lane whose state falls below 2^16 takes the next word: a block is the count of its words, its
states, and its words. All is little endian; groups and blocks begin at multiples of 64 bytes and are padded with zeros.
Layout: docs/contracts/weights.md, section 6. Source: J. Duda, Asymmetric numeral systems (arXiv 1311.2540), section 3;
lanes as in F. Giesen, Interleaved entropy coders (arXiv 1402.3392).
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

from nearflash.abi.bitmap import HEADER_BYTES, bitmap_error
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import ShapeError
from nearflash.abi.python310 import Self
from nearflash.abi.topk import StreamFault

__all__ = [
    "HEAD_BYTES",
    "LANES",
    "LOWEST_STATE",
    "MOST_SLOTS",
    "PRECISION_BITS",
    "RANS_MAGIC",
    "STATES_BYTES",
    "TABLE_BYTES",
    "VALUES",
    "WORD_BITS",
    "RansHeader",
]

RANS_MAGIC = b"NFRA"
VALUES = 256
"""Of a byte."""
PRECISION_BITS = 13
"""The frequencies of a group add up to 2^13."""
MOST_SLOTS = (1 << (PRECISION_BITS - 1)) - 1
"""Of a value, at most: so every element takes a bit or more, and a stream bounds the elements that it can have."""
LANES = 32
WORD_BITS = 16
LOWEST_STATE = 1 << WORD_BITS
"""Of a state; the one that an encoder begins with, and a decoder ends with."""
TABLE_BYTES = 2 * VALUES
"""Frequencies of a group, uint16."""
HEAD_BYTES = 4
"""Of a block: how many words it has, uint32."""
STATES_BYTES = 4 * LANES
_VERSION = 1
_HEADER = struct.Struct("<4sH6xIIQQI20x")
_MOST = 1 << 48
"""Elements of a tensor, at most."""


@dataclass(frozen=True)
class RansHeader:
    """Header of the rANS-coded bytes of a tensor of so many elements, in blocks, checked in groups of blocks."""

    what: ClassVar[str] = "rANS-coded weights"

    elements: int
    block_elements: int
    group_blocks: int
    stream_bytes: int
    """Bytes with the header."""
    ends_crc32c: int | None = 0
    """CRC32C of the used bytes of all groups' ends, in order (nearflash.abi.bitmap.check_groups)."""

    def __post_init__(self) -> None:
        if not (0 < self.elements <= _MOST and 0 < self.block_elements < 1 << 32 and 0 < self.group_blocks < 1 << 32):
            sizes = f"{self.elements}, {self.block_elements} and {self.group_blocks}"
            raise ShapeError(f"elements, block_elements and group_blocks must be 1 at least, not {sizes}")

    @property
    def blocks(self) -> int:
        """Blocks; the last one may have fewer elements."""
        return -(-self.elements // self.block_elements)

    @property
    def groups(self) -> int:
        """Groups of blocks; the last one may have fewer."""
        return -(-self.blocks // self.group_blocks)

    def pack(self) -> bytes:
        """The header's 64 bytes; the last four are the CRC32C of those before."""
        sizes = self.block_elements, self.group_blocks, self.elements, self.stream_bytes, self.ends_crc32c
        text = _HEADER.pack(RANS_MAGIC, _VERSION, *sizes)
        return text + crc32c(text).to_bytes(4, "little")

    @classmethod
    def unpack(cls, text: bytes, stream_bytes: int) -> Self:
        """Header of a stream of `stream_bytes` bytes. Raises StreamError for any other."""
        if min(len(text), stream_bytes) < HEADER_BYTES:
            raise bitmap_error(StreamFault.LENGTH, f"after {min(len(text), stream_bytes)} bytes", cls.what)
        magic, version, block_elements, group_blocks, elements, stated, ends = _HEADER.unpack(text[: _HEADER.size])
        if magic != RANS_MAGIC or version != _VERSION:
            raise bitmap_error(StreamFault.HEADER, f"magic {magic!r} and version {version}", cls.what)
        if crc32c(text[: _HEADER.size]) != int.from_bytes(text[_HEADER.size : HEADER_BYTES], "little"):
            raise bitmap_error(StreamFault.CHECKSUM, "another one in its header", cls.what)
        sizes = f"{elements} elements, {block_elements} a block, {group_blocks} blocks a group"
        if not (block_elements and group_blocks):
            raise bitmap_error(StreamFault.HEADER, sizes, cls.what)
        if not 0 < elements <= _MOST or elements > 8 * stream_bytes:
            raise bitmap_error(StreamFault.LENGTH, f"{stream_bytes} bytes for {sizes}", cls.what)
        if stated != stream_bytes:
            raise bitmap_error(StreamFault.LENGTH, f"{stream_bytes} bytes where {stated} are stated", cls.what)
        return cls(elements, block_elements, group_blocks, stream_bytes, ends)
