"""How far a generation is: the times of its steps, for people and for the figures after it; its text as it comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TextIO

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria, TextStreamer

from nearflash.inference.engines.base import Engine, EngineCounters

__all__ = ["Ends", "GenerationClock", "GenerationProgress", "ProgressCallback", "TextOut"]


@dataclass(frozen=True)
class GenerationProgress:
    """How far a generation is."""

    step: int
    """Tokens of each sequence, of the mini-batch that is behind most."""
    steps: int
    """Of these at most."""
    tokens_per_s: float
    """All sequences' together, since the first token."""
    flash_bytes_per_token: float
    """Asked for attention so far, by token after the first ones."""
    remaining_s: float
    """Time left at this rate, if no sequence ends early."""


@dataclass
class GenerationClock:
    """Times the steps of all mini-batches, and reports how far they are."""

    engine: Engine
    before: EngineCounters
    sequences: int
    mini_batches: int
    max_new_tokens: int
    report: Callable[[GenerationProgress], None] | None
    steps: dict[int, int] = field(default_factory=dict)
    start: float = field(default_factory=perf_counter)
    first: float | None = None
    last: float = 0.0
    stopped: bool = False
    """The mini-batches are to end with the token that they are at."""

    @property
    def prefill_s(self) -> float:
        """Until every mini-batch had its first token."""
        return (self.first or self.last or self.start) - self.start

    @property
    def decode_s(self) -> float:
        """From then on."""
        return self.last - (self.first or self.last)

    def tick(self, part: int) -> None:
        """A mini-batch has one token more."""
        self.steps[part] = self.steps.get(part, 0) + 1
        self.last = perf_counter()
        if len(self.steps) < self.mini_batches:
            return
        step = min(self.steps.values())
        if self.first is None:
            self.first = self.last
        if self.report is not None:
            per_step_s = self.decode_s / max(step - 1, 1)
            rate = self.sequences / per_step_s if step > 1 else 0.0
            flash_bytes = sum((self.engine.counters - self.before).flash_bytes.values())
            per_token = flash_bytes / max((step - 1) * self.sequences, 1)
            remaining_s = per_step_s * (self.max_new_tokens - step)
            self.report(GenerationProgress(step, self.max_new_tokens, rate, per_token, remaining_s))


class TextOut(TextStreamer):
    """Writes whole words of the reply as they come."""

    def __init__(self, tokenizer: Any, out: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See TextStreamer."""
        print(text, end="\n" if stream_end else "", file=self._out, flush=True)


class ProgressCallback(StoppingCriteria):
    """Called at every token; stops what the clock says is stopped."""

    def __init__(self, clock: GenerationClock, part: int) -> None:
        self._clock, self._part = clock, part

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """See StoppingCriteria."""
        self._clock.tick(self._part)
        return torch.full((len(input_ids),), self._clock.stopped, dtype=torch.bool, device=input_ids.device)


class Ends(StoppingCriteria):
    """The end of each text: at a stop token, or where one of the strings or criteria ends it.

    transformers goes on with a text that has ended while others of its batch have not; what it adds is cut off here.
    """

    def __init__(self, stops: Sequence[int], strings: list[str], tokenizer: Any, criteria: Sequence[Any] = ()) -> None:
        criteria_of_strings = [StopStringCriteria(tokenizer, strings)] if strings else []
        self._stops, self._criteria = frozenset(stops), StoppingCriteriaList([*criteria_of_strings, *criteria])
        self._widths: dict[int, int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """See StoppingCriteria."""
        done: torch.Tensor = self._criteria(input_ids, scores, **kwargs)
        if self._criteria:
            for row in done.nonzero()[:, 0].tolist():
                self._widths.setdefault(row, input_ids.shape[1])
        return done

    def has_ended(self, row: int, token: int) -> bool:
        """Whether a text ends with its last token, this one."""
        return token in self._stops or row in self._widths

    def new_tokens(self, row: int, tokens: list[int], prompt: int) -> list[int]:
        """The tokens of a row of the batch, after `prompt` tokens, up to its end."""
        new = tokens[prompt : self._widths.get(row)]
        end = next((number for number, token in enumerate(new) if token in self._stops), len(new))
        return new[: end + 1]
