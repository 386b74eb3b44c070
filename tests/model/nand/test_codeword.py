import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.model.nand.codeword import check, decode, raw_codewords, seal

OWNER = PageTag(sequence=7, layer=3, head=11)
PAGE = (1234, PageKind.TOKEN)
BITS = 8 * 550


def page(count: int = 24, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    data, aux = rng.integers(0, 256, (count, 512), np.uint8), rng.integers(0, 256, (count, 8), np.uint8)
    return np.hstack([aux, data]), seal(OWNER, *PAGE, data, aux)


def flipped(stored: np.ndarray, row: int, bits: np.ndarray) -> None:
    for bit in bits:
        stored[row, bit // 8] ^= 1 << bit % 8


def test_up_to_16_errors_are_corrected_anywhere():
    content, sealed = page(17 * 4)
    stored = raw_codewords(sealed, 99, 2)
    rng = np.random.default_rng(3)
    errors = np.arange(len(stored)) % 17
    for row, count in enumerate(errors):
        low = (0, 0, 8 * 520, 8 * 524)[row // 17]  # anywhere, anywhere, CRC and parity, parity
        flipped(stored, row, low + rng.choice(BITS - low, count, replace=False))
    found = decode(stored, 99, 2, OWNER, *PAGE)
    np.testing.assert_array_equal(np.hstack([found.aux, found.data]), content)
    np.testing.assert_array_equal(found.errors, errors)
    assert not found.uncorrectable.any() and not found.misdirected.any()


@pytest.mark.parametrize("count", [17, 18, 40, 2200])
def test_more_errors_are_never_silent(count):
    _, sealed = page(32)
    stored = raw_codewords(sealed, 5, 0)
    rng = np.random.default_rng(count)
    for row in range(len(stored)):
        flipped(stored, row, rng.choice(BITS, count, replace=False))
    found = decode(stored, 5, 0, OWNER, *PAGE)
    assert found.uncorrectable.all() and (found.errors == -1).all() and not found.misdirected.any()


def test_another_owner_page_or_number_is_foreign():
    content, sealed = page(8)
    stored = raw_codewords(sealed, 5, 0)
    other = PageTag(7, 3, 12)
    assert decode(stored, 5, 0, other, *PAGE).misdirected.all()
    assert decode(stored, 5, 0, OWNER, 1235, PageKind.TOKEN).misdirected.all()
    assert decode(stored, 5, 0, OWNER, 1234, PageKind.INDEX).misdirected.all()
    assert decode(stored, 5, 0, OWNER, *PAGE, first=1).misdirected.all()
    assert check(sealed, other, *PAGE).misdirected.all()
    found = check(sealed, OWNER, *PAGE)
    np.testing.assert_array_equal(np.hstack([found.aux, found.data]), content)
    assert not found.misdirected.any() and not found.uncorrectable.any()


def test_a_codeword_stands_alone():
    content, sealed = page(8)
    stored = raw_codewords(sealed, 5, 3)[6:]
    found = decode(stored, 5, 3, OWNER, *PAGE, place=6, first=6)
    np.testing.assert_array_equal(found.data, content[6:, 8:])
    assert not found.misdirected.any()


def test_pad_bytes_do_not_matter():
    _, sealed = page(2)
    stored = raw_codewords(sealed, 5, 3)
    stored[:, 550:] ^= 0xFF
    assert (decode(stored, 5, 3, OWNER, *PAGE).errors == 0).all()


@pytest.mark.parametrize(
    ("rate", "pages"),
    [(1e-4, 8), *(pytest.param(rate, 1000, marks=pytest.mark.full) for rate in (1e-6, 1e-4, 1e-3, 3e-3))],
)
def test_random_bit_errors(rate, pages):
    rng = np.random.default_rng(4)
    content, sealed = page(32)
    for number in range(pages):
        noise = np.packbits(rng.random((32, BITS)) < rate, axis=1, bitorder="little")
        stored = raw_codewords(sealed, number, 1)
        stored[:, :550] ^= noise
        found = decode(stored, number, 1, OWNER, *PAGE)
        wrong_bits = np.unpackbits(noise, axis=1).sum(axis=1, dtype=np.int64)
        np.testing.assert_array_equal(found.errors, np.where(wrong_bits > 16, -1, wrong_bits))
        good = ~found.uncorrectable
        np.testing.assert_array_equal(np.hstack([found.aux, found.data])[good], content[good])
        assert not found.misdirected.any()
