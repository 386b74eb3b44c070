import numpy as np

from nearflash.abi.attention.codeword import RAW_BYTES, SCRAMBLE_POLYNOMIAL, scramble_byte, scramble_seed
from nearflash.model.nand.scramble import scrambling


def test_equals_one_register_step_by_step():
    row, unit, place = 0xDEAD_BEEF, 0xA5, 17
    state = scramble_seed(row, unit, place)
    bits = []
    for _ in range(64 + 8 * RAW_BYTES):
        bits.append(state & 1)
        state <<= 1
        state ^= (state >> 20) * SCRAMBLE_POLYNOMIAL
    expected = np.packbits(bits[64:], bitorder="little")
    np.testing.assert_array_equal(scrambling(row, unit, np.array([place]))[0], expected)


def test_polynomial_is_primitive():
    def power(exponent: int) -> int:
        value, square = 1, 2
        for bit in f"{exponent:b}"[::-1]:
            value = times(value, square) if bit == "1" else value
            square = times(square, square)
        return value

    def times(a: int, b: int) -> int:
        product = 0
        for k in range(20):
            product ^= (b >> k & 1) * a
            a = a << 1 ^ (a >> 19) * SCRAMBLE_POLYNOMIAL
        return product

    order = (1 << 20) - 1
    assert power(order) == 1
    assert all(power(order // prime) != 1 for prime in (3, 5, 11, 31, 41))


def test_neighbours_differ_in_half_of_their_bits():
    rows = [(row, 5) for row in (0x12345, 0x12346, 0x12347, 0x12348, 0x12388)] + [(0x12345, 4), (1 << 31, 255)]
    bits = np.unpackbits(np.vstack([scrambling(*page, np.arange(32)) for page in rows]), axis=1).astype(np.float32)
    assert (np.abs(bits.mean(axis=1) - 0.5) < 0.05).all()
    different = (bits[:, None, :] != bits[None, ::7, :]).mean(axis=2)
    assert ((different == 0) | (np.abs(different - 0.5) < 0.05)).all()
    assert (different == 0).sum() == different.shape[1], "every sequence is equal to itself only"


def test_single_bytes_are_those_of_the_sequence():
    sequences = scrambling(0x1234, 3, np.arange(8))
    for place, column in ((0, 0), (7, 232), (5, RAW_BYTES - 1)):
        assert scramble_byte(0x1234, 3, place, column) == sequences[place, column]
