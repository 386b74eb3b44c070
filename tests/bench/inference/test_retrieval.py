"""Prompts of the retrieval task: every fact is there once, spread over the prompt, and has its question."""

from itertools import pairwise

import pytest

from nearflash.bench.inference.retrieval import _NAMES, prompt


class Words:
    """A tokenizer whose tokens are words (by their characters' sum)."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [hash_of(word) for word in text.split()]}


def hash_of(word):
    return sum(ord(letter) * 31**place for place, letter in enumerate(word.strip("."))) % 1_000_003


@pytest.mark.parametrize("seed", [0, 1])
def test_prompts_hold_every_fact_once(seed):
    ids, questions, answers = prompt(Words(), 2000, seed)
    tokens = ids.tolist()
    assert 1800 < len(tokens) < 2100 and len(questions) == len(set(answers.tolist())) == len(_NAMES)
    places = []
    for question, answer in zip(questions, answers, strict=True):
        fact = [*question.tolist(), int(answer)]
        found = [place for place in range(len(tokens)) if tokens[place : place + len(fact)] == fact]
        assert len(found) == 1
        places += found
    assert max(b - a for a, b in pairwise(sorted(places))) < 0.3 * len(tokens)


def test_prompts_are_drawn_with_a_seed():
    one, same, other = (prompt(Words(), 2000, seed)[0] for seed in (0, 0, 1))
    assert one.equal(same) and not one.equal(other)
