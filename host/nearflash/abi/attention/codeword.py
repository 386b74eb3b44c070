"""Codewords: the unit of reading, of checking and of correction on flash (docs/contracts/attention.md, 2)."""

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, reduce
from operator import xor

__all__ = [
    "AUX_BYTES",
    "BCH_BITS",
    "BCH_ERRORS",
    "BCH_POLYNOMIAL",
    "CODEWORD_BYTES",
    "HEADER_MAGIC",
    "MESSAGE_BYTES",
    "PARITY_BYTES",
    "RAW_BYTES",
    "SCRAMBLE_POLYNOMIAL",
    "SCRAMBLE_SKIP",
    "SEALED_BYTES",
    "PageKind",
    "PageTag",
    "scramble_byte",
    "scramble_seed",
]

CODEWORD_BYTES = 512
"""Data bytes of a codeword."""
AUX_BYTES = 8
BCH_BITS = 13
"""The code is over GF(2^13)."""
BCH_POLYNOMIAL = 0x201B
"""x^13 + x^4 + x^3 + x + 1, of which alpha is a root: bit k is the coefficient of x^k."""
BCH_ERRORS = 16
"""Bit errors that are corrected in a codeword."""
MESSAGE_BYTES = AUX_BYTES + CODEWORD_BYTES + 4
"""What the BCH code protects: aux, data, CRC32C."""
PARITY_BYTES = BCH_BITS * BCH_ERRORS // 8
SEALED_BYTES = MESSAGE_BYTES + 4
"""Codeword in memory: aux, data, CRC32C, four zero bytes."""
RAW_BYTES = MESSAGE_BYTES + PARITY_BYTES + 2
"""Codeword on NAND: aux, data, CRC32C, parity, two zero bytes."""
SCRAMBLE_POLYNOMIAL = 0x19A3D1
"""Primitive, of degree 20: bit k is the coefficient of x^k."""
SCRAMBLE_SKIP = 64
"""Steps from the seed to the first bit of the scrambling sequence."""
HEADER_MAGIC = int.from_bytes(b"NFKV", "little")


class PageKind(IntEnum):
    """Contents of a page."""

    TOKEN = 0
    INDEX = 1


@dataclass(frozen=True)
class PageTag:
    """Whose page it is: one KV head of one layer of one sequence."""

    sequence: int
    layer: int
    head: int

    def block(self, page_index: int, kind: PageKind, codeword: int) -> bytes:
        """The 16 bytes that the CRC of a codeword begins with."""
        return struct.pack("<IHHIBBH", self.sequence, self.layer, self.head, page_index, kind, codeword, 0)


def scramble_seed(row: int, lun: int, place: int) -> int:
    """State of the scrambler for the codeword at `place` (below 32) of the page at (lun, row): never zero."""
    return 1 << 19 | ((row & 0x3FFF) << 5 | place) ^ row >> 14 ^ lun << 11


def scramble_byte(row: int, lun: int, place: int, column: int) -> int:
    """Byte `column` of the sequence that the codeword at `place` of the page at (lun, row) is scrambled with."""
    seed = scramble_seed(row, lun, place)
    parts = (part for bit, part in enumerate(_scramble_parts(column)) if seed >> bit & 1)
    return reduce(xor, parts, 0)


@cache
def _scramble_parts(column: int) -> tuple[int, ...]:
    """The parts of a byte that each bit of the seed contributes."""
    return tuple(_run_scrambler(1 << bit, column) for bit in range(SCRAMBLE_POLYNOMIAL.bit_length() - 1))


def _run_scrambler(state: int, column: int) -> int:
    degree, byte = SCRAMBLE_POLYNOMIAL.bit_length() - 1, 0
    for step in range(-SCRAMBLE_SKIP, 8 * column + 8):
        if step >= 8 * column:
            byte |= (state & 1) << step - 8 * column
        state = state << 1 ^ (SCRAMBLE_POLYNOMIAL if state >> degree - 1 else 0)
    return byte
