"""Codewords: sizes that hardware and files share, the bytes of a page tag, the scrambler's seeds."""

import pytest

from nearflash.abi.attention import codeword
from nearflash.abi.attention.codeword import PageKind, PageTag, scramble_byte, scramble_seed


def test_sizes_add_up():
    assert codeword.MESSAGE_BYTES == 8 + 512 + 4
    assert codeword.SEALED_BYTES == 528 and codeword.SEALED_BYTES % 8 == 0
    assert codeword.PARITY_BYTES == 26, "16 errors over GF(2^13)"
    assert codeword.RAW_BYTES == 552 and codeword.RAW_BYTES % 8 == 0
    assert 8 * (codeword.MESSAGE_BYTES + codeword.PARITY_BYTES) < 1 << codeword.BCH_BITS, "within the code's length"


def order(polynomial):
    """Steps until x comes back to 1 modulo a polynomial over GF(2)."""
    top, state, steps = 1 << polynomial.bit_length() - 1, 2, 1
    while state != 1:
        state <<= 1
        if state & top:
            state ^= polynomial
        steps += 1
    return steps


def test_the_fields_polynomial_is_primitive():
    assert codeword.BCH_POLYNOMIAL.bit_length() - 1 == codeword.BCH_BITS
    assert order(codeword.BCH_POLYNOMIAL) == (1 << 13) - 1


def test_the_scramblers_polynomial_is_primitive():
    assert codeword.SCRAMBLE_POLYNOMIAL.bit_length() - 1 == 20
    assert order(codeword.SCRAMBLE_POLYNOMIAL) == (1 << 20) - 1


def test_the_block_that_a_checksum_begins_with():
    block = PageTag(0x01020304, 0x0506, 0x0708).block(0x090A0B0C, PageKind.INDEX, 13)
    assert block == bytes.fromhex("04030201 0605 0807 0c0b0a09 01 0d 0000")
    assert len(block) == 16


def test_each_part_of_a_tag_changes_the_block():
    tag = PageTag(1, 2, 3)
    blocks = {
        tag.block(4, PageKind.TOKEN, 5),
        PageTag(2, 2, 3).block(4, PageKind.TOKEN, 5),
        PageTag(1, 3, 3).block(4, PageKind.TOKEN, 5),
        PageTag(1, 2, 4).block(4, PageKind.TOKEN, 5),
        tag.block(5, PageKind.TOKEN, 5),
        tag.block(4, PageKind.INDEX, 5),
        tag.block(4, PageKind.TOKEN, 6),
    }
    assert len(blocks) == 7


def test_header_magic_is_readable():
    assert codeword.HEADER_MAGIC.to_bytes(4, "little") == b"NFKV"


@pytest.mark.parametrize(
    ("row", "lun", "place", "seed"),
    [
        (0, 0, 0, 0x80000),
        (0, 0, 31, 0x8001F),
        (1, 0, 0, 0x80020),
        (0x3FFF, 0, 31, 0xFFFFF),
        (0x4000, 0, 0, 0x80001),  # a row's upper bits fold into the lower ones
        (0, 1, 0, 0x80800),
        (0, 3, 2, 0x81802),
    ],
)
def test_seeds(row, lun, place, seed):
    assert scramble_seed(row, lun, place) == seed


def test_seeds_of_neighbours_differ_and_are_never_zero():
    seeds = {scramble_seed(row, lun, place) for row in range(256) for lun in (0,) for place in range(32)}
    assert len(seeds) == 256 * 32
    assert all(1 << 19 <= scramble_seed(row, lun, 31) < 1 << 20 for row in (0, 0x3FFF, 0xFFFFFF) for lun in range(16))


@pytest.mark.parametrize(("row", "lun", "place", "column"), [(0, 0, 0, 0), (0xDEAD, 3, 7, 232), (1 << 23, 0, 31, 551)])
def test_bytes_of_the_scrambling_are_those_of_a_register(row, lun, place, column):
    state, bits = scramble_seed(row, lun, place), []
    for _ in range(codeword.SCRAMBLE_SKIP + 8 * codeword.RAW_BYTES):
        bits.append(state & 1)
        state <<= 1
        state ^= (state >> 20) * codeword.SCRAMBLE_POLYNOMIAL
    first = codeword.SCRAMBLE_SKIP + 8 * column
    assert scramble_byte(row, lun, place, column) == sum(bit << at for at, bit in enumerate(bits[first : first + 8]))


def test_bytes_of_neighbouring_pages_differ():
    assert len({scramble_byte(row, lun, 7, 232) for row in range(64) for lun in range(4)}) > 16
