import math
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from nearflash.abi.errors import CommandError
from nearflash.weights.perplexity import hold_out, perplexity, windows


class Constant:
    """Gives each token of a vocabulary of `size` the same logit, but `bonus` more to token 0."""

    device = torch.device("cpu")

    def __init__(self, size, bonus=0.0):
        self.logits = torch.zeros(size)
        self.logits[0] = bonus

    def __call__(self, tokens, use_cache):
        return SimpleNamespace(logits=self.logits.expand(*tokens.shape, -1))


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    tokens = torch.arange(40).reshape(4, 10)
    assert perplexity(Constant(50), tokens) == pytest.approx(50)


def test_each_windows_first_token_is_given():
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    tokens[:, 0] = 7  # not predicted, so it costs nothing
    probability = math.exp(2) / (math.exp(2) + 9)
    assert perplexity(Constant(10, bonus=2.0), tokens) == pytest.approx(1 / probability)


def test_the_mean_is_of_tokens_and_not_of_windows():
    tokens = torch.tensor([[1, 0, 0], [1, 0, 1]])
    right, wrong = (-math.log(x / (math.exp(2) + 9)) for x in (math.exp(2), 1))
    assert perplexity(Constant(10, bonus=2.0), tokens) == pytest.approx(math.exp((3 * right + wrong) / 4))


def test_windows_are_of_one_text_each():
    found = windows([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]], 2)
    assert found.tolist() == [[1, 2], [3, 4], [6, 7], [8, 9]] and found.dtype == torch.int64


@pytest.mark.parametrize("texts", [[], [[1] * 9], [[1] * 19], [[1] * 9] * 3])
def test_texts_that_are_too_short(texts):
    with pytest.raises(CommandError, match=r"texts must have two windows of 10 tokens or more, not [01]"):
        windows(texts, 10)


@pytest.mark.parametrize(("count", "kept"), [(2, [1]), (7, [6]), (8, [7]), (9, [7]), (33, [7, 15, 23, 31])])
def test_an_eighth_is_held_out(count, kept):
    tokens = torch.arange(count)[:, None]
    calibration, others = hold_out(tokens, 1000)
    assert others.flatten().tolist() == kept
    assert calibration.flatten().tolist() == [number for number in range(count) if number not in kept]


def test_windows_for_calibration_are_from_all_over():
    calibration, others = hold_out(torch.arange(64)[:, None], 5)
    assert calibration.flatten().tolist() == [0, 16, 32, 46, 62] and len(others) == 8
