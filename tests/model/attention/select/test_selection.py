"""Selection of whole heads against exact fractions and floating point."""

from fractions import Fraction

import numpy as np
import pytest

from nearflash.model.attention.select.entries import entries
from nearflash.model.attention.select.selection import (
    logit_keys,
    probabilities,
    probability_keys,
    references,
    selection,
    terms,
    weights,
)


def logits(group: int, tokens: int, seed: int, deviation: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(0, deviation, (group, tokens)) * 65536).astype(np.int64)


@pytest.mark.parametrize("entry_tokens", [1, 16])
def test_probabilities_are_those_of_softmax(entry_tokens: int) -> None:
    x = logits(4, 640, seed=1)
    powers = np.exp2(x / 65536)
    exact = (powers / powers.sum(axis=1, keepdims=True)).reshape(4, -1, entry_tokens).sum(axis=(0, 2))
    np.testing.assert_allclose(probabilities(entries(x, entry_tokens)) / 2**24, exact, rtol=2e-3, atol=1e-6)


def test_shares_equal_the_definition_in_fractions() -> None:
    found = entries(logits(3, 100, seed=2, deviation=9.0), 4)
    expected = [0] * 25
    for head in terms(found).tolist():
        bits = sum(head).bit_length()
        reciprocal = int(Fraction((1 << 15 + bits) - 1, sum(head)))
        assert 1 << 15 <= reciprocal < 1 << 16
        expected = [v + min(t * reciprocal >> bits - 9, (1 << 24) - 1) for v, t in zip(expected, head, strict=True)]
    assert probabilities(found).tolist() == expected


def test_keys_order_as_the_numbers_do() -> None:
    found = entries(logits(8, 4000, seed=3, deviation=40.0), 4)
    for keys, numbers in (
        (logit_keys(found), found.x_max.sum(axis=0)),
        (probability_keys(probabilities(found)), probabilities(found)),
    ):
        assert (np.diff(keys[np.argsort(numbers, kind="stable")].astype(int)) >= 0).all()


def test_weights_are_the_numbers_to_eleven_bits() -> None:
    v = np.array([0, 1, 2047, 2049, 2051, (1 << 27) - 1, 12345678], np.int64)
    assert weights(v).tolist() == [0, 1, 2047, 2048, 2052, 1 << 27, 12345344]


@pytest.mark.parametrize("probability", [False, True])
def test_the_local_window_comes_first(probability: bool) -> None:
    found = entries(logits(2, 50, seed=4), 1)
    chosen = selection(found, 9, 45, probability=probability).mask
    assert chosen.sum() == 9
    assert chosen[45:].all()
    assert selection(found, 3, 45, probability=probability).mask.nonzero()[0].tolist() == [45, 46, 47]


def test_alpha_is_the_share_of_the_selected() -> None:
    found = entries(logits(2, 64, seed=5), 1)
    some, every = selection(found, 20, 60), selection(found, 64, 60)
    shares = terms(found)
    np.testing.assert_array_equal(some.references, references(found))
    np.testing.assert_allclose(some.alpha, shares[:, some.mask].sum(axis=1) / shares.sum(axis=1), rtol=2e-7)
    assert every.alpha.tolist() == [1.0, 1.0]


def test_mass_holds_at_least_the_share_asked_for() -> None:
    found = entries(logits(3, 512, seed=6, deviation=4.0), 4)
    held = weights(probabilities(found))
    chosen = selection(found, 128, 127, probability=True, mass=60000).mask
    assert held[chosen].sum() << 16 >= 60000 * held.sum()
    assert chosen.sum() < 128
    assert selection(found, 5, 127, probability=True, mass=60000).mask.sum() == 5
