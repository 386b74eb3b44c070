import numpy as np

from nearflash.model.nand.bch.encoder import generator, parity
from nearflash.model.nand.bch.field import power


def test_generator_has_the_roots_of_the_code():
    g = generator()
    assert g.bit_length() - 1 == 208
    exponents = np.array([k for k in range(209) if g >> k & 1])
    for i in range(1, 33):
        assert np.bitwise_xor.reduce(power(i * exponents)) == 0
    assert np.bitwise_xor.reduce(power(33 * exponents)) != 0


def test_codewords_have_the_roots_of_the_code():
    """Root evaluation, which knows nothing of the generator."""
    messages = np.random.default_rng(1).integers(0, 256, (5, 524), np.uint8)
    codewords = np.hstack([messages, parity(messages)])
    bits = np.unpackbits(codewords, axis=1, bitorder="little").astype(bool)
    for row in bits:
        exponents = 4399 - np.flatnonzero(row)
        assert all(np.bitwise_xor.reduce(power(i * exponents)) == 0 for i in range(1, 33))


def test_parity_is_the_remainder():
    """Polynomial division in Python integers."""
    message = np.random.default_rng(2).integers(0, 256, (1, 524), np.uint8)
    bits = np.unpackbits(message[0], bitorder="little")
    value, g = int("".join(map(str, bits)), 2) << 208, generator()
    while value.bit_length() > 208:
        value ^= g << (value.bit_length() - 209)
    expected = np.packbits([int(b) for b in f"{value:0208b}"], bitorder="little")
    np.testing.assert_array_equal(parity(message)[0], expected)
