"""Codewords: the unit of reading, of checking and of correction on flash (docs/attention.md, 2)."""

import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "AUX_BYTES",
    "BCH_BITS",
    "BCH_ERRORS",
    "CODEWORD_BYTES",
    "HEADER_MAGIC",
    "MESSAGE_BYTES",
    "PARITY_BYTES",
    "RAW_BYTES",
    "SEALED_BYTES",
    "Owner",
    "PageKind",
]

CODEWORD_BYTES = 512
"""Data bytes of a codeword."""
AUX_BYTES = 8
BCH_BITS = 13
"""The code is over GF(2^13)."""
BCH_ERRORS = 16
"""Bit errors that are corrected in a codeword."""
MESSAGE_BYTES = AUX_BYTES + CODEWORD_BYTES + 4
"""What the BCH code protects: aux, data, CRC32C."""
PARITY_BYTES = BCH_BITS * BCH_ERRORS // 8
SEALED_BYTES = MESSAGE_BYTES + 4
"""Codeword in memory: aux, data, CRC32C, four zero bytes."""
RAW_BYTES = MESSAGE_BYTES + PARITY_BYTES + 2
"""Codeword on NAND: aux, data, CRC32C, parity, two zero bytes."""
HEADER_MAGIC = int.from_bytes(b"NFKV", "little")


class PageKind(IntEnum):
    """What a page holds."""

    TOKEN = 0
    INDEX = 1


@dataclass(frozen=True)
class Owner:
    """Whose page it is: one KV head of one layer of one sequence."""

    sequence: int
    layer: int
    head: int

    def block(self, page_index: int, kind: PageKind, codeword: int) -> bytes:
        """The 16 bytes that the CRC of a codeword begins with."""
        return struct.pack("<IHHIBBH", self.sequence, self.layer, self.head, page_index, kind, codeword, 0)
