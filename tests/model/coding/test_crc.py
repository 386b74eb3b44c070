import random

import numpy as np

from nearflash.model.coding.crc import crc32c

CASTAGNOLI = 1 << 32 | 0x1EDC6F41


def divided(message: bytes) -> int:
    """CRC32C by the book: long division of a polynomial, no table and no reflected constant."""
    bits = [message[k // 8] >> k % 8 & 1 for k in range(8 * len(message))] + [0] * 32
    for k in range(32):
        bits[k] ^= 1
    remainder = 0
    for bit in bits:
        remainder = remainder << 1 | bit
        remainder ^= (remainder >> 32) * CASTAGNOLI
    return int(f"{remainder:032b}"[::-1], 2) ^ 0xFFFF_FFFF


def test_check_value():
    assert crc32c(b"123456789") == 0xE306_9283


def test_rfc_3720_vectors():
    """RFC 3720, B.4."""
    assert crc32c(bytes(32)) == 0x8A91_36AA
    assert crc32c(b"\xff" * 32) == 0x62A8_AB43
    assert crc32c(bytes(range(32))) == 0x46DD_794E


def test_equals_long_division():
    for length in (4, 5, 17, 536):
        message = random.Random(length).randbytes(length)
        assert crc32c(message) == divided(message)


def test_rows():
    rows = np.random.default_rng(1).integers(0, 256, (3, 5, 40), np.uint8)
    assert all(crc32c(rows[i, j].tobytes()) == crc32c(rows)[i, j] for i in range(3) for j in range(5))
