"""One run of a list of prompts: block after block, each batch transformers' own generation in a fiber."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteria

from nearflash.inference import AttentionMode, AttentionPolicy, NearflashCache, open_engine
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.inference.engines.base import Engine
from nearflash.inference.progress import Ends
from nearflash.inference.prompts import left_padded
from nearflash.inference.settings import GenerationSettings
from nearflash.offload.cache.block import Block, BlockShape, on_device
from nearflash.offload.cache.kv_cache import TieredCache
from nearflash.offload.results import Results
from nearflash.offload.sampling import GumbelSampler, warpers
from nearflash.offload.schedule.zigzag import Batch, Interception, ZigZag
from nearflash.offload.tiers.report import CACHE_WAIT, COMPUTE, STATES_WAIT, WEIGHTS_WAIT, Report
from nearflash.offload.weights.experts import EXPERTS_WAIT
from nearflash.support.process import peak_resident_bytes
from nearflash.weights.pretrained import silent_transformers

__all__ = ["OffloadProgress", "OffloadResult", "Run"]

_PHASES = (COMPUTE, WEIGHTS_WAIT, CACHE_WAIT, STATES_WAIT, EXPERTS_WAIT, "between layers")


@dataclass(frozen=True)
class OffloadProgress:
    """How far a generation is."""

    finished: int
    """Prompts, those of earlier runs included."""
    prompts: int
    step: int
    """Tokens of each prompt of the block that is computed."""
    steps: int
    """Of these at most."""
    tokens_per_s: float
    """Of all prompts computed in this run, since its start."""
    remaining_s: float
    """Until all are finished, at the rate of this run so far, if no text ends early."""


@dataclass(frozen=True)
class OffloadResult:
    """What came of the prompts, in their order."""

    tokens: list[list[int]]
    """New ones, up to the stop token."""
    texts: list[str]
    """Empty where the model has no tokenizer."""
    report: Report
    resumed: int = 0
    """Prompts whose results an earlier run had written."""


class Run:
    """One call of `generate` of an OffloadedModel, `owner`."""

    def __init__(
        self, owner: Any, rows: list[list[int]], settings: GenerationSettings, seed: int,
        on_text: Callable[[int, list[int], str], None] | None, progress: Callable[[OffloadProgress], None] | None,
        engine: Engine | None, attention: AttentionPolicy | None,
    ) -> None:  # fmt: skip
        self._engine, self._attention = engine, attention or AttentionPolicy(AttentionMode.DENSE)
        self._owner, self._rows, self._steps = owner, rows, settings.max_new_tokens
        self._settings, self._seed, self._on_text, self._progress = settings, seed, on_text, progress
        self._found: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        self._finished = self._resumed = self._step = 0
        self._first_s = 0.0
        self._start = perf_counter()
        self._generated = 0
        cache = owner.experts
        self._experts_before = (0, 0, 0) if cache is None else (cache.hits, cache.ahead_hits, cache.misses)

    def all(self, results: Results | None) -> OffloadResult:
        """Every block; results of each are written when it is finished."""
        owner = self._owner
        owner.ledger.clear()
        if results is not None:
            for number, (tokens, text) in results.done.items():
                self._found[number], self._texts[number] = tokens, text
        resumed = self._resumed = self._finished = len(self._found)
        left = [number for number in range(len(self._rows)) if number not in self._found]
        blocks = [left[at : at + owner.policy.block_size] for at in range(0, len(left), owner.policy.block_size)]
        self._start, prefill_s, decode_s = perf_counter(), 0.0, 0.0
        if blocks:
            dtype, shapes = owner.model.dtype, [self._shape(block) for block in blocks]
            room = Block(
                owner.model.config, dtype, owner.policy, shapes, link=owner.link, ledger=owner.ledger,
                scratch=owner.scratch, owns=owner.owns,
            )  # fmt: skip
            stops = Interception([*owner.skeleton.layers, *owner.skeleton.others])
            with self._device_engine(shapes), room, stops, silent_transformers():
                for place, (block, shape) in enumerate(zip(blocks, shapes, strict=True)):
                    start = perf_counter()
                    self._block(room, block, shape, more=place + 1 < len(blocks))
                    prefill_s += self._first_s - start
                    decode_s += perf_counter() - self._first_s
                    if results is not None:
                        results.add({number: (self._found[number], self._texts[number]) for number in block})
        report = self._report(prefill_s, decode_s, sum(len(self._found[number]) for number in left))
        every = range(len(self._rows))
        return OffloadResult([self._found[n] for n in every], [self._texts[n] for n in every], report, resumed)

    def _device_engine(self, shapes: list[BlockShape]) -> AbstractContextManager[Any]:
        """The engine of the batches on a device, open for the block; one that was given stays open."""
        owner = self._owner
        numbers = [on_device(owner.policy, len(shape.batches)) for shape in shapes]
        if not max(numbers):
            return nullcontext()
        attach(owner.model)
        if self._engine is not None:
            return nullcontext()
        own = [shape.batches[:number] for shape, number in zip(shapes, numbers, strict=True)]
        self._engine = open_engine(
            kv_shape_of(owner.model.config), self._attention,
            tokens=max(tokens for batches in own for _, tokens in batches),
            sequences=max(sum(count for count, _ in batches) for batches in own),
        )  # fmt: skip
        return self._engine

    def _shape(self, block: list[int]) -> BlockShape:
        longest = [max(len(self._rows[number]) for number in batch) for batch in self._batches(block)]
        sizes = [(len(batch), width + self._steps) for batch, width in zip(self._batches(block), longest, strict=True)]
        return BlockShape(tuple(sizes), max(longest))

    def _batches(self, block: list[int]) -> list[list[int]]:
        size = self._owner.policy.batch_size
        return [block[at : at + size] for at in range(0, len(block), size)]

    def _block(self, room: Block, block: list[int], shape: BlockShape, more: bool) -> None:
        owner, batches = self._owner, []
        self._step = 0
        assert room.mover is not None
        for number, prompts in enumerate(self._batches(block)):
            layers, parked = room.batch(shape, number)
            cache: Any = TieredCache(owner.model.config, layers)
            if number < on_device(owner.policy, len(shape.batches)):
                assert self._engine is not None
                cache = NearflashCache(self._engine, owner.model.config)
            run = _BatchRun(self, prompts, cache)
            batches.append(Batch(run.generate, f"batch {number}", layers, parked, self._steps))
        schedule = ZigZag(
            owner.skeleton.layers, owner.weights, room.mover, owner.ledger, self._tick, owner.pipeline,
            owner.model.get_output_embeddings(),
            split=owner.experts is None,  # which are read once for a batch
        )  # fmt: skip
        schedule.run(batches, more=more)
        self._step = 0

    def finish(self, prompt: int, tokens: list[int]) -> None:
        """A prompt's text has come to its end."""
        self._found[prompt] = tokens
        self._texts[prompt] = self._owner.text_of(tokens)
        self._finished += 1
        if self._on_text is not None:
            self._on_text(prompt, tokens, self._texts[prompt])

    def count(self, tokens: int) -> None:
        """So many tokens more, of one batch."""
        self._generated += tokens
        if self._step == 1:  # its batches' first tokens follow the first pass
            self._first_s = perf_counter()

    @property
    def chooses(self) -> bool:
        """Whether this process chooses tokens: the last of several ranks does."""
        return self._owner.pipeline is None or self._owner.pipeline.is_last

    def send(self, tokens: torch.Tensor) -> None:
        """Tokens that were chosen, to other ranks."""
        if self._owner.pipeline is not None and self._owner.pipeline.is_last:
            self._owner.pipeline.send_tokens(tokens)

    def _tick(self) -> None:
        """All batches of the block have passed all layers."""
        self._step += 1
        if self._progress is not None:
            spent = perf_counter() - self._start
            all_tokens = (len(self._rows) - self._resumed) * self._steps
            rate = self._generated / spent
            left = max(all_tokens - self._generated, 0) / rate if rate else 0.0
            self._progress(OffloadProgress(self._finished, len(self._rows), self._step, self._steps, rate, left))

    def _report(self, prefill_s: float, decode_s: float, new_tokens: int) -> Report:
        ledger = self._owner.ledger
        self._owner.link.finish()
        seconds = {name: ledger.timeline.seconds.get(name, 0.0) for name in _PHASES}
        total = perf_counter() - self._start
        return Report(
            new_tokens, total, prefill_s, decode_s, seconds, dict(ledger.links), dict(ledger.peaks),
            peak_resident_bytes(), self._owner.weights_s, *self._expert_counts(),
        )  # fmt: skip

    def _expert_counts(self) -> tuple[int, int, int]:
        """Experts that were in memory, on their way, and neither, in this call."""
        cache = self._owner.experts
        now = (0, 0, 0) if cache is None else (cache.hits, cache.ahead_hits, cache.misses)
        hits, ahead, misses = (one - other for one, other in zip(now, self._experts_before, strict=True))
        return hits, ahead, misses

    @property
    def settings(self) -> tuple[Any, list[list[int]], GenerationSettings]:
        """Model, prompts and settings."""
        return self._owner.model, self._rows, self._settings

    def options(self, prompts: list[int]) -> dict[str, Any]:
        """Of transformers' generate for a batch; where another rank chooses tokens, they are repeated as they come."""
        if not self.chooses:
            return self._settings.repeating
        options = self._settings.options | {"do_sample": False, "prefill_chunk_size": None}
        if self._settings.is_sampled:
            warp = warpers(self._owner.model, self._settings)
            options["logits_processor"] = [GumbelSampler(prompts, warp, self._seed)]
        return options

    def ends(self) -> Ends:
        """Where texts of a batch end."""
        strings = self._settings.stop_strings
        return Ends(self._settings.stops, strings, self._owner.tokenizer if strings else None)


class _BatchRun(StoppingCriteria):
    """transformers' generation of one batch, in a fiber."""

    def __init__(self, run: Run, prompts: list[int], cache: Any) -> None:
        self._run, self._prompts, self._cache = run, prompts, cache
        self._open = set(range(len(prompts)))
        self._ends = run.ends()
        self._width = 0

    def generate(self) -> None:
        """All of it; each text's end is reported when it comes."""
        model, rows, settings = self._run.settings
        own = [rows[prompt] for prompt in self._prompts]
        self._width = max(map(len, own))
        out = model.generate(
            **left_padded(own, settings.fields["pad_token_id"], model.device), past_key_values=self._cache,
            stopping_criteria=[self], **self._run.options(self._prompts),
        )  # fmt: skip
        for row in sorted(self._open):
            self._finish(row, out)
        if isinstance(self._cache, NearflashCache):
            self._cache.check_complete(out.shape[1] - 1)
            self._cache.reset()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Report the texts that ended with the last token; stops those that a string ends."""
        done = self._ends(input_ids, scores)
        self._run.count(len(self._open))
        self._run.send(input_ids[:, -1])
        last = input_ids[:, -1].tolist()
        for row in [row for row in self._open if self._ends.has_ended(row, last[row])]:
            self._finish(row, input_ids)
            self._open.discard(row)
        return done

    def _finish(self, row: int, ids: torch.Tensor) -> None:
        self._run.finish(self._prompts[row], self._ends.new_tokens(row, ids[row].tolist(), self._width))
