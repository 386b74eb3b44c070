"""Entries equal the definition, token by token in Python integers."""

from fractions import Fraction

import numpy as np
import pytest

from nearflash.model.attention.numerics.exp2 import significand
from nearflash.model.attention.select.entries import entries

LARGEST = (1 << 27) - 1


def by_definition(logits: list[int], entry_tokens: int) -> list[tuple[int, int]]:
    found = []
    for start in range(0, len(logits), entry_tokens):
        held = logits[start : start + entry_tokens]
        most = max(x >> 16 for x in held)
        total = sum(
            int(Fraction(int(significand(np.array([x & 0xFFFF]))[0]) * 16, 1 << most - (x >> 16))) for x in held
        )
        found.append((max(held) >> 8, total >> (entry_tokens - 1).bit_length()))
    return found


@pytest.mark.parametrize("entry_tokens", [1, 4, 12, 16, 64])
@pytest.mark.parametrize("spread", [1 << 12, 1 << 18, LARGEST])
def test_equal_the_definition(entry_tokens: int, spread: int) -> None:
    logits = np.random.default_rng(entry_tokens).integers(-spread, spread, (3, 145))
    got = entries(logits, entry_tokens)
    for head in range(3):
        pairs = list(zip(got.x_max[head].tolist(), got.mass[head].tolist(), strict=True))
        assert pairs == by_definition(logits[head].tolist(), entry_tokens)


def test_fits_its_format() -> None:
    extremes = np.array([[-LARGEST - 1] * 64 + [LARGEST] * 64])
    got = entries(extremes, 64)
    assert got.x_max.tolist() == [[-(1 << 19), (1 << 19) - 1]]
    assert got.mass.tolist() == [[1 << 14, 1 << 15]]
