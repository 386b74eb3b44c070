"""A model's perplexity and its answers to questions with choices, of a file of JSON lines that a user has.

A line is a text, {"text": …}, or a question. Of questions the fields are those of lm-eval's documents: a context
(`query`, `ctx`, `question`, `goal`), choices (`choices`, also as {"text": […], "label": […]}; `endings`; `sol1` and
`sol2`) and the right one (`gold`, `label`, `answer`, by number from 0 or by letter; `answerKey`, by a choice's label).
An answer is the choice whose tokens, behind the context, are likeliest (`accuracy`); or likeliest a byte
(`accuracy_norm`), as lm-eval has it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nearflash.abi.errors import CommandError
from nearflash.support.files import read_text

__all__ = ["Evaluation", "Question", "evaluate", "read_evaluation"]

_CONTEXTS, _GOLD = ("query", "ctx", "question", "goal"), ("gold", "label", "answer", "answerKey")


@dataclass(frozen=True)
class Question:
    """A context, its continuations, and the number of the right one."""

    context: str
    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class Evaluation:
    """Texts and questions of a file."""

    texts: tuple[str, ...]
    questions: tuple[Question, ...]


def read_evaluation(file: Path) -> Evaluation:
    """The texts and questions of a file. Raises CommandError, with the line's number, for any that is neither."""
    try:
        lines = read_text(file).split("\n")  # a JSON string may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"evaluation must be a readable UTF-8 file, not {str(file)!r}: {error}") from error
    found: list[str | Question] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_parse(json.loads(line)))
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                rule = f"{file}, line {number} must be a text or a question with choices"
                raise CommandError(f"{rule}: {error}") from error
    if not found:
        raise CommandError(f"{file} must have a text or a question, and has none")
    questions = tuple(each for each in found if isinstance(each, Question))
    return Evaluation(tuple(each for each in found if isinstance(each, str)), questions)


def _parse(line: Any) -> str | Question:
    if not isinstance(line, dict):
        raise ValueError("it is no object")
    if isinstance(text := line.get("text"), str) and text.strip():
        return text
    context = next((line[name] for name in _CONTEXTS if isinstance(line.get(name), str)), None)
    choices, labels = _find_choices(line)
    if not context or len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"it must have text, or one of {', '.join(_CONTEXTS)} and two choices or more")
    gold = next((line[name] for name in _GOLD if name in line), None)
    return Question(context, tuple(choices), _find_right(gold, labels))


def _find_choices(line: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Choices, and how an answer names each of them."""
    if "sol1" in line:
        choices = [line["sol1"], line["sol2"]]
    else:
        choices = line["choices"] if "choices" in line else line["endings"]
    if isinstance(choices, dict):
        return choices["text"], [str(label) for label in choices["label"]]
    return choices, [chr(ord("A") + number) for number in range(len(choices))]


def _find_right(gold: Any, labels: list[str]) -> int:
    if str(gold) in labels:
        return labels.index(str(gold))
    number = int(gold)
    if not 0 <= number < len(labels):
        raise ValueError(f"the right choice must be one of {len(labels)}, not {gold}")
    return number


@torch.no_grad()
def evaluate(model: Any, tokenizer: Any, evaluation: Evaluation, most_tokens: int = 1024) -> dict[str, float]:
    """Perplexity of the texts, and shares of questions that are answered rightly; what there is nothing of is left out.

    most_tokens: of a text, or of a context's end with its choice.
    """
    found: dict[str, float] = {}
    if evaluation.texts:
        scores = [_score(model, *_split(tokenizer, "", text), most_tokens) for text in evaluation.texts]
        tokens = sum(count for _, count in scores)
        found["perplexity"] = math.exp(-sum(score for score, _ in scores) / max(tokens, 1))
    if evaluation.questions:
        answers = [_answer(model, tokenizer, question, most_tokens) for question in evaluation.questions]
        for number, name in enumerate(("accuracy", "accuracy_norm")):
            found[name] = sum(answer[number] for answer in answers) / len(answers)
    return found


def _answer(model: Any, tokenizer: Any, question: Question, most_tokens: int) -> tuple[bool, bool]:
    """Whether the likeliest choice is the right one, and the likeliest a byte."""
    context = question.context.rstrip()
    scores = [_score(model, *_split(tokenizer, context, f" {choice.strip()}"), most_tokens)[0]
              for choice in question.choices]  # fmt: skip
    each_byte = [score / len(choice.encode()) for score, choice in zip(scores, question.choices, strict=True)]
    return _likeliest(scores) == question.right, _likeliest(each_byte) == question.right


def _likeliest(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda number: scores[number])


def _split(tokenizer: Any, context: str, text: str) -> tuple[Sequence[int], int]:
    """Token ids of a context and what follows, and how many are the context's; 1, where there is none."""
    ids = tokenizer(context + text, verbose=False)["input_ids"]
    before = len(tokenizer(context, verbose=False)["input_ids"]) if context else 1
    return ids, min(before, len(ids) - 1)


def _score(model: Any, ids: Sequence[int], before: int, most_tokens: int) -> tuple[float, int]:
    """Sum of the log-likelihoods, in nats, of the tokens from `before` on, and how many there are."""
    dropped = max(len(ids) - most_tokens, 0) if before > 1 else 0
    window = torch.tensor(ids[dropped : dropped + most_tokens], device=model.device)
    first = max(before - dropped, 1)
    if len(window) <= first:
        return 0.0, 0
    logits = model(window[None], use_cache=False).logits[0, first - 1 : -1].float().log_softmax(-1)
    return float(logits.gather(1, window[first:, None]).sum()), len(window) - first
