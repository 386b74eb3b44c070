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

from nearflash.abi.bitmap import pack_fields, unpack_fields
from nearflash.abi.blocks import BlockSizes, check_stated_sizes
from nearflash.abi.python310 import Self

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


@dataclass(frozen=True)
class RansHeader(BlockSizes):
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
        self.check_sizes()

    def pack(self) -> bytes:
        """The header's 64 bytes; the last four are the CRC32C of those before."""
        sizes = self.block_elements, self.group_blocks, self.elements, self.stream_bytes, self.ends_crc32c
        return pack_fields(_HEADER, RANS_MAGIC, _VERSION, *sizes)

    @classmethod
    def unpack(cls, text: bytes, stream_bytes: int) -> Self:
        """Header of a stream of `stream_bytes` bytes. Raises StreamError for any other."""
        fields = unpack_fields(text, stream_bytes, _HEADER, (RANS_MAGIC, _VERSION), cls.what)
        block_elements, group_blocks, elements, stated, ends = fields
        check_stated_sizes(elements, block_elements, group_blocks, stated, stream_bytes, cls.what)
        return cls(elements, block_elements, group_blocks, stream_bytes, ends)
