import numpy as np
import pytest

from nearflash.model.nand.bch.corrector import UNCORRECTABLE, correct
from nearflash.model.nand.bch.encoder import parity


def codewords(count: int, seed: int) -> np.ndarray:
    messages = np.random.default_rng(seed).integers(0, 256, (count, 524), np.uint8)
    return np.hstack([messages, parity(messages)])


def with_errors(clean: np.ndarray, errors: int, span: int, seed: int) -> np.ndarray:
    """`errors` wrong bits in each row, within `span` bits that begin anywhere."""
    rng, received = np.random.default_rng(seed), clean.copy()
    for row in received:
        start = rng.integers(0, 4400 - span + 1)
        for bit in start + rng.choice(span, errors, replace=False):
            row[bit // 8] ^= 1 << bit % 8
    return received


def test_every_number_of_errors_scattered_and_in_bursts():
    clean = codewords(10, 1)
    for errors in range(17):
        for span in (4400, 200, 16):
            corrected, found = correct(with_errors(clean, errors, span, errors))
            np.testing.assert_array_equal(corrected, clean)
            assert (found == errors).all()


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.full)])
def test_every_single_bit(step):
    clean = codewords(1, 2)
    bits = np.arange(0, 4400, step)
    received = np.repeat(clean, len(bits), axis=0)
    received[np.arange(len(bits)), bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    corrected, found = correct(received)
    assert (corrected == clean).all() and (found == 1).all()


def test_too_many_errors_are_left_alone():
    clean = codewords(50, 3)
    for errors in (17, 18, 25, 60):
        received = with_errors(clean, errors, 4400, errors)
        corrected, found = correct(received)
        np.testing.assert_array_equal(corrected, received)
        assert (found == UNCORRECTABLE).all()


def test_empty():
    assert correct(np.zeros((0, 550), np.uint8))[0].shape == (0, 550)
