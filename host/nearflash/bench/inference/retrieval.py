"""Looking values up: the share of words that a model finds again by their names in thousands of tokens of filler.

A prompt holds lines such as `Alice = apple`, of several names, spread over filler sentences; after it stands the
beginning of one of those lines. A word is found where, of all of them, its first token has the largest logit. The
prompt is dense, the question attends by the mode. Prompts are drawn with a seed.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nearflash.bench.inference.recommended import recommend
from nearflash.bench.inference.settings import Setting
from nearflash.inference.calibration.window import FlashUse, Prefix

__all__ = ["measure", "prompt"]

_MODES = ("dense", "sparf", "sparf-page", "local")
_NAMES = ("Alice", "Boris", "Chen", "Dana", "Emil", "Fatima")
_WORDS = (
    " apple", " garden", " silver", " tiger", " window", " coffee", " ocean", " paper", " rocket", " winter",
    " music", " bread", " castle", " forest", " mirror", " sugar",
)  # fmt: skip
_FILLER = (
    "The river was quiet that morning, and nobody was on the bridge. ",
    "A train passed behind the houses, as it did every hour. ",
    "Someone had left a bicycle at the gate of the garden. ",
    "In the afternoon it rained a little, then the clouds went away. ",
    "The shop at the corner sold bread, paper and lamps. ",
    "Two boats lay at the pier, and their ropes were old. ",
    "Children were playing in the yard until it became dark. ",
)


def prompt(tokenizer: Any, tokens: int, seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """About `tokens` token ids; the question for each name; first tokens of their words, in that order."""
    draw = random.Random(seed)
    words = draw.sample(_WORDS, len(_NAMES))
    facts = [f"\n{name} ={word}\n" for name, word in zip(_NAMES, words, strict=True)]
    sentence_tokens = len(tokenizer("".join(_FILLER))["input_ids"]) / len(_FILLER)
    sentences = [draw.choice(_FILLER) for _ in range(int((tokens - 8 * len(facts)) / sentence_tokens))]
    for number, fact in enumerate(draw.sample(facts, len(facts))):
        sentences.insert((2 * number + 1) * len(sentences) // (2 * len(facts)), fact)
    questions = [tokenizer(f"\n{name} =", add_special_tokens=False)["input_ids"] for name in _NAMES]
    answers = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words]
    ids = tokenizer("".join(sentences))["input_ids"]
    return torch.tensor(ids), [torch.tensor(question) for question in questions], torch.tensor(answers)


def measure(
    name: str, model: Any, tokenizer: Any, mode: str | None, tokens: tuple[int, ...] = (4096,), prompts: int = 5
) -> Iterator[dict[str, Any]]:
    """A row for each of the modes (or the one), and each length of the prompt; the model's attention is replaced."""
    modes = [name_of_mode for name_of_mode in _MODES if mode in (None, name_of_mode)]
    settings = [recommend(model.config, name_of_mode) for name_of_mode in modes]
    for count in tokens:
        hits: list[list[bool]] = [[] for _ in settings]
        uses: list[list[FlashUse]] = [[] for _ in settings]
        for seed in range(prompts):
            ids, questions, answers = prompt(tokenizer, count, seed)
            prefix = Prefix(model, ids, history=False)
            for index, setting in enumerate(settings):
                for number, question in enumerate(questions):
                    logits, use = prefix.logits(question, setting.attend)
                    hits[index].append(int(logits[-1, answers].argmax()) == number)
                    uses[index].append(use)
        yield from (_row(name, s, len(ids), f, u) for s, f, u in zip(settings, hits, uses, strict=True))


def _row(name: str, setting: Setting, tokens: int, hits: list[bool], uses: list[FlashUse]) -> dict[str, Any]:
    return {
        "model": name,
        "task": "retrieval",
        "mode": setting.mode,
        "tokens": tokens,
        "questions": len(hits),
        "found_fraction": sum(hits) / len(hits),
        "flash_fraction": FlashUse.mean(uses).all,
    }
