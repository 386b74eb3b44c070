import numpy as np

from nearflash.gateware.nand.bch.syndromes import Syndromes
from nearflash.model.nand.bch.encoder import parity
from nearflash.model.nand.bch.field import power


def sum_of(i: int, coordinates: int) -> int:
    """The element with these coordinates in the powers of alpha^(64·i)."""
    return np.bitwise_xor.reduce([int(power(np.array(64 * i * k))) for k in range(13) if coordinates >> k & 1] or [0])


def test_equals_evaluation(clocked):
    """The values at alpha^i of 69 beats of random bits, of codewords too, with gaps between beats."""
    rng = np.random.default_rng(1)
    messages = rng.integers(0, 256, (3, 524), np.uint8)
    codewords = np.hstack([messages, parity(messages), np.zeros((3, 2), np.uint8)])
    received = np.vstack([rng.integers(0, 256, (3, 552), np.uint8), codewords])[[0, 3, 1, 4, 5, 2]]
    rows = []
    for words in received.view("<u8"):
        for beat, word in enumerate(words):
            gap = {"enable": 0, "first": int(rng.integers(2)), "data": int(rng.integers(1 << 62))}
            rows += [gap] * int(rng.integers(2)) + [{"enable": 1, "first": int(beat == 0), "data": int(word)}]
    outputs = clocked(Syndromes(), rows)
    found = [value for row, value in zip(rows, outputs, strict=True) if row["enable"]][68::69]
    for row, value in zip(received, found, strict=True):
        exponents = 4415 - np.flatnonzero(np.unpackbits(row, bitorder="little"))
        expected = [np.bitwise_xor.reduce(power(i * exponents)) for i in range(1, 32, 2)]
        assert [sum_of(2 * k + 1, value >> 13 * k & 0x1FFF) for k in range(16)] == expected
    assert [value == 0 for value in found] == [False, True, False, True, True, False]
