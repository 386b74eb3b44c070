"""One run of a list of prompts: block after block, each batch transformers' own generation in a fiber."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteria

from nearflash.inference import AttentionPolicy, NearflashCache
from nearflash.inference.cache.attention import NAME as NEAR_STORAGE
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.predicted import check_predictions
from nearflash.inference.engines.base import Engine
from nearflash.inference.progress import Ends
from nearflash.inference.prompts import pad_left
from nearflash.inference.settings import GenerationSettings
from nearflash.offload.cache.block import BatchShape, Block, BlockShape
from nearflash.offload.cache.engines import BlockEngines, KvPlaces
from nearflash.offload.report import OffloadProgress, OffloadReport, OffloadResult
from nearflash.offload.results import Results
from nearflash.offload.sampling import GumbelSampler, warpers
from nearflash.offload.schedule.pipeline import PipelineStage
from nearflash.offload.schedule.zigzag import Interception, ScheduledBatch, ZigZag, attend_beside
from nearflash.offload.tiers.ledger import PHASES, Ledger
from nearflash.offload.tiers.link import DeviceLink
from nearflash.offload.weights.experts.cache import ExpertCache, HitCounts
from nearflash.offload.weights.layer_weights import LayerWeights
from nearflash.planning.policy import OffloadPolicy
from nearflash.support.process import peak_resident_bytes
from nearflash.weights.pretrained import silent_transformers

__all__ = ["OffloadRun", "RunContext", "RunRequest"]


@dataclass(frozen=True)
class RunContext:
    """A model and its parts on their tiers, as a run uses them; they stay open after it."""

    model: Any
    """transformers' model, whose layers' parameters have no memory of their own."""
    layers: Sequence[Any]
    """Its decoder layers, in their order."""
    others: Sequence[Any]
    """Modules outside the layers that have parameters."""
    policy: OffloadPolicy
    weights: LayerWeights
    experts: ExpertCache | None
    link: DeviceLink
    ledger: Ledger
    stage: PipelineStage
    """This process's share of the layers."""
    scratch: Path | None
    """Folder of the file for what lies on disk; None: the system's for temporary files."""
    weights_s: float
    """Seconds that loading took."""
    text_of: Callable[[list[int]], str]
    """Makes text of tokens."""


@dataclass(frozen=True)
class RunRequest:
    """The arguments of one call of `OffloadedModel.generate`, resolved."""

    prompts: list[list[int]]
    settings: GenerationSettings
    seed: int = 0
    tokenizer: Any = None
    """For strings that end a text; None where there are none."""
    on_text: Callable[[int, list[int], str], None] | None = None
    progress: Callable[[OffloadProgress], None] | None = None
    engine: Engine | None = None
    attention: AttentionPolicy | None = None
    """Of the engines that are opened where none is given; None: dense."""
    places: KvPlaces = field(default_factory=KvPlaces)


class OffloadRun:
    """One call of `generate`."""

    def __init__(self, context: RunContext, request: RunRequest) -> None:
        self.context, self.request = context, request
        self._steps = request.settings.max_new_tokens
        self._tokens: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        self._resumed = self._step = self._generated = 0
        self._start = self._first_s = perf_counter()
        self._prefill_s = self._decode_s = 0.0
        self._experts_before = self._hit_counts()

    def all(self, results: Results | None) -> OffloadResult:
        """Every block; results of each are written when it is finished."""
        self.context.ledger.clear()
        for number, (tokens, text) in ({} if results is None else results.done).items():
            self._tokens[number], self._texts[number] = tokens, text
        self._resumed, numbers = len(self._tokens), range(len(self.request.prompts))
        left = [number for number in numbers if number not in self._tokens]
        self._start = perf_counter()
        if left:
            self._compute(_split(left, self.context.policy.block_size), results)
        report = self._report(sum(len(self._tokens[number]) for number in left))
        return OffloadResult(
            [self._tokens[n] for n in numbers], [self._texts[n] for n in numbers], report, self._resumed
        )

    def _compute(self, blocks: list[list[int]], results: Results | None) -> None:
        """Compute the prompts of blocks, which are their numbers, with one memory for all of them."""
        context, request, shapes = self.context, self.request, [self._shape(prompts) for prompts in blocks]
        engines = BlockEngines(
            context.model.config, context.policy, request.attention, request.places, shapes, ledger=context.ledger,
            scratch=context.scratch, given=request.engine,
        )  # fmt: skip
        with engines, silent_transformers():
            if engines.tiers(max(len(shape.batches) for shape in shapes)):
                attach(context.model)
            if (first := engines.of(0, len(shapes[0].batches))) is not None and first.takes_predictions:
                check_predictions(context.model)
            memory = Block(
                context.model.config, context.model.dtype, context.policy, shapes, link=context.link,
                ledger=context.ledger, scratch=context.scratch, owns=context.stage.owns,
                in_engines=lambda batches: len(engines.tiers(batches)), attend=attend_beside,
            )  # fmt: skip
            if memory.attends_on_host:
                context.model.set_attn_implementation(NEAR_STORAGE)
            with memory, Interception([*context.layers, *context.others]):
                for index, (prompts, shape) in enumerate(zip(blocks, shapes, strict=True)):
                    start = perf_counter()
                    self._compute_block(memory, engines, prompts, shape, more=index + 1 < len(blocks))
                    self._prefill_s += self._first_s - start
                    self._decode_s += perf_counter() - self._first_s
                    if results is not None:
                        results.add({number: (self._tokens[number], self._texts[number]) for number in prompts})

    def _shape(self, prompts: list[int]) -> BlockShape:
        batches = _split(prompts, self.context.policy.batch_size)
        longest = [max(len(self.request.prompts[number]) for number in batch) for batch in batches]
        shapes = (BatchShape(len(batch), width + self._steps) for batch, width in zip(batches, longest, strict=True))
        return BlockShape(tuple(shapes), max(longest))

    def _compute_block(
        self, memory: Block, engines: BlockEngines, prompts: list[int], shape: BlockShape, more: bool
    ) -> None:
        context, batches = self.context, []
        self._step = 0
        for number, batch in enumerate(_split(prompts, context.policy.batch_size)):
            tiered, parked = memory.batch(shape, number)
            cache: Any = tiered
            if (engine := engines.of(number, len(shape.batches))) is not None:
                cache = NearflashCache(engine, context.model.config)
            generation = _BatchGeneration(self, batch, cache)
            batches.append(ScheduledBatch(generation.generate, f"batch {number}", tiered.tiered, parked, self._steps))
        assert memory.mover is not None
        schedule = ZigZag(
            context.layers, context.weights, memory.mover, context.ledger, context.stage,
            context.model.get_output_embeddings(), self._tick,
            split=context.experts is None,  # which are read once for a batch
        )  # fmt: skip
        schedule.run(batches, more=more)

    def finish(self, prompt: int, tokens: list[int]) -> None:
        """A prompt's text has come to its end."""
        self._tokens[prompt] = tokens
        self._texts[prompt] = self.context.text_of(tokens)
        if self.request.on_text is not None:
            self.request.on_text(prompt, tokens, self._texts[prompt])

    def count(self, tokens: int) -> None:
        """So many tokens more, of one batch."""
        self._generated += tokens
        if self._step == 1:  # its batches' first tokens follow the first pass
            self._first_s = perf_counter()

    def _tick(self) -> None:
        """All batches of the block have passed all layers."""
        self._step += 1
        if self.request.progress is not None:
            prompts = len(self.request.prompts)
            rate = self._generated / (perf_counter() - self._start)
            left = max((prompts - self._resumed) * self._steps - self._generated, 0) / rate if rate else 0.0
            done = OffloadProgress(len(self._tokens), prompts, self._step, self._steps, rate, left)
            self.request.progress(done)

    def _report(self, new_tokens: int) -> OffloadReport:
        ledger, hits = self.context.ledger, self._hit_counts() - self._experts_before
        self.context.link.finish()
        return OffloadReport(
            new_tokens=new_tokens,
            total_s=perf_counter() - self._start,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            seconds={name: ledger.timeline.seconds.get(name, 0.0) for name in PHASES},
            link_bytes=dict(ledger.links),
            peak_bytes=dict(ledger.peaks),
            peak_process_bytes=peak_resident_bytes(),
            weights_s=self.context.weights_s,
            expert_hits=hits.hits,
            experts_ahead=hits.ahead,
            expert_misses=hits.misses,
        )

    def _hit_counts(self) -> HitCounts:
        return HitCounts() if self.context.experts is None else self.context.experts.hit_counts

    def options(self, prompts: list[int]) -> dict[str, Any]:
        """Options of transformers' generate for a batch; where another rank chooses tokens, they are repeated as they
        come.
        """
        settings = self.request.settings
        if not self.context.stage.is_last:
            return settings.repeating
        options = settings.options | {"do_sample": False, "prefill_chunk_size": None}
        if settings.is_sampled:
            warp = warpers(self.context.model, settings)
            options["logits_processor"] = [GumbelSampler(prompts, warp, self.request.seed)]
        return options


class _BatchGeneration(StoppingCriteria):
    """transformers' generation of one batch, in a fiber."""

    def __init__(self, run: OffloadRun, prompts: list[int], cache: Any) -> None:
        self._run, self._prompts, self._cache = run, prompts, cache
        self._model, self._stage = run.context.model, run.context.stage
        self._rows = [run.request.prompts[prompt] for prompt in prompts]
        self._width = max(map(len, self._rows))
        self._open = set(range(len(prompts)))
        settings = run.request.settings
        self._pad = settings.fields["pad_token_id"]
        self._ends = Ends(settings.stops, settings.stop_strings, run.request.tokenizer)

    def generate(self) -> None:
        """All of it; each text's end is reported when it comes."""
        out = self._model.generate(
            **pad_left(self._rows, self._pad, self._model.device), past_key_values=self._cache,
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
        if self._stage.is_last:
            self._stage.send_tokens(input_ids[:, -1])
        last = input_ids[:, -1].tolist()
        for row in [row for row in self._open if self._ends.has_ended(row, last[row])]:
            self._finish(row, input_ids)
            self._open.discard(row)
        return done

    def _finish(self, row: int, ids: torch.Tensor) -> None:
        self._run.finish(self._prompts[row], self._ends.new_tokens(row, ids[row].tolist(), self._width))


def _split(prompts: list[int], size: int) -> list[list[int]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
