"""How far a generation is: the times of its steps, for people and for the figures after it; its text as it comes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TextIO

import torch
from transformers import StoppingCriteria, TextStreamer

from nearflash.inference.engines.base import Engine, EngineCounters

__all__ = ["Clock", "Progress", "TextOut", "Tick"]


@dataclass(frozen=True)
class Progress:
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
class Clock:
    """Times the steps of all mini-batches, and reports how far they are."""

    engine: Engine
    before: EngineCounters
    sequences: int
    mini_batches: int
    max_new_tokens: int
    report: Callable[[Progress], None] | None
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
            self.report(Progress(step, self.max_new_tokens, rate, per_token, per_step_s * (self.max_new_tokens - step)))


class TextOut(TextStreamer):
    """Writes whole words of the reply as they come."""

    def __init__(self, tokenizer: Any, out: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See TextStreamer."""
        print(text, end="\n" if stream_end else "", file=self._out, flush=True)


class Tick(StoppingCriteria):
    """Called at every token; stops what the clock says is stopped."""

    def __init__(self, clock: Clock, part: int) -> None:
        self._clock, self._part = clock, part

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """See StoppingCriteria."""
        self._clock.tick(self._part)
        return torch.full((len(input_ids),), self._clock.stopped, dtype=torch.bool, device=input_ids.device)
