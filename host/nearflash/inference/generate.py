"""Texts continued with KV near storage: what `nearflash generate` does, as a function."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch
from transformers import StoppingCriteriaList

from nearflash.abi.errors import CommandError
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.cache.predicted import check_predictions
from nearflash.inference.engines.base import Engine, EngineCounters
from nearflash.inference.progress import Ends, GenerationClock, GenerationProgress, ProgressCallback, TextOut
from nearflash.inference.prompts import encode_text, pad_left, position_limit, prompt_rows, vocabulary_size
from nearflash.inference.settings import (
    Caller,
    GenerationSettings,
    check_processors,
    check_seed,
    generation_settings,
    raise_command_errors,
)

__all__ = ["Generated", "ends_of", "generate", "settings_of"]


@dataclass(frozen=True)
class Generated:
    """The texts of the prompts, in their order."""

    texts: list[str]
    tokens: list[list[int]]
    """New ones, up to the end-of-text token."""
    prefill_s: float
    """Until the first new token of every sequence."""
    decode_s: float
    """From then on."""
    counters: EngineCounters
    """Of the engine, for these prompts alone."""
    reused_tokens: int = 0
    """Of the prompts, whose K and V were stored already."""

    @property
    def tokens_per_s(self) -> float:
        """New tokens after the first ones, by the time of decode."""
        return sum(max(len(tokens) - 1, 0) for tokens in self.tokens) / max(self.decode_s, 1e-9)

    @property
    def flash_bytes_per_token(self) -> float:
        """Bytes read from flash for attention, by new token after the first ones."""
        steps = sum(max(len(tokens) - 1, 0) for tokens in self.tokens)
        return sum(self.counters.flash_bytes.values()) / max(steps, 1)


def generate(
    model: Any, tokenizer: Any, prompts: Any, engine: Engine, *, max_new_tokens: int | None = None,
    mini_batches: int = 1, chat: bool = False, progress: Callable[[GenerationProgress], None] | None = None,
    stream: TextIO | None = None, seed: int | None = None, **options: Any,
) -> Generated:  # fmt: skip
    """Continue all prompts as one batch, as `options` of model.generate and the model's generation configuration state.

    Prompts are texts, or lists of token ids (nearflash.inference.prompts). Each is continued as it would be alone.
    With several `mini_batches` of prompts each runs in a thread of its own: one computes while another is attended to.
    `chat` wraps each text as a user's message by the tokenizer's template. The text of a single prompt goes to
    `stream` as it comes. `seed`: torch's, where tokens are drawn. Raises CommandError for no prompts, empty ones, more
    mini-batches than prompts, or a tokenizer without a template; what `generation_settings`, cache, engine and model
    raise. An interrupt ends it with the token that it is at.
    """
    encode = partial(encode_text, tokenizer, chat=chat)
    rows = prompt_rows(prompts, encode, vocabulary_size(model))
    settings = settings_of(model, tokenizer, Caller.GENERATE, rows, max_new_tokens, options)
    check_seed(seed)
    _check(settings, len(rows), mini_batches, stream)
    if engine.takes_predictions:
        check_predictions(model)
    attach(model)
    before = engine.counters + EngineCounters()
    clock = GenerationClock(engine, before, len(rows), mini_batches, settings.max_new_tokens, progress)

    def run(part: int) -> list[list[int]]:
        mini_batch = rows[part::mini_batches]
        batch = pad_left(mini_batch, settings.fields["pad_token_id"], model.device)
        width = max(map(len, mini_batch))
        ends = ends_of(settings, tokenizer)
        with NearflashCache(engine, model.config) as cache, raise_command_errors(lambda: not cache.sequences):
            shown = None if stream is None else TextOut(tokenizer, stream)
            criteria = StoppingCriteriaList([ProgressCallback(clock, part), ends])
            out = model.generate(
                **batch, past_key_values=cache, stopping_criteria=criteria, streamer=shown, **settings.options
            )
            cache.check_complete(out.shape[1] - 1)
        return [ends.new_tokens(row, tokens, width) for row, tokens in enumerate(out.tolist())]

    if seed is not None:
        torch.manual_seed(seed)
    with ThreadPoolExecutor(mini_batches, "mini-batch") as pool:
        futures = [pool.submit(run, part) for part in range(mini_batches)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            clock.stopped = True  # after an interrupt, or an error of one of them, the others are not waited for long
        parts = [future.result() for future in futures]
    tokens = [parts[row % mini_batches][row // mini_batches] for row in range(len(rows))]
    return Generated(
        tokenizer.batch_decode(tokens, skip_special_tokens=True), tokens, clock.prefill_s, clock.decode_s,
        engine.counters - before,
    )  # fmt: skip


def settings_of(
    model: Any, tokenizer: Any, caller: Caller, rows: list[list[int]], max_new_tokens: int | None,
    options: dict[str, Any],
) -> GenerationSettings:  # fmt: skip
    """Settings of a generation by a model in memory. Raises as `generation_settings` does."""
    length = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    settings = generation_settings(
        model.generation_config, caller, list(map(len, rows)), vocabulary=vocabulary_size(model),
        positions=position_limit(model.config), pad=tokenizer.pad_token_id, options=options | length,
    )  # fmt: skip
    check_processors(model, settings, max(rows, key=len))
    return settings


def ends_of(settings: GenerationSettings, tokenizer: Any) -> Ends:
    """Ends of the texts of a batch; one for each batch. Raises CommandError for criteria that are none."""
    criteria = settings.extras.get("stopping_criteria") or ()
    criteria = list(criteria) if isinstance(criteria, list | tuple) else [criteria]
    if not all(map(callable, criteria)):
        raise CommandError(f"stopping_criteria must be a list of StoppingCriteria, not {criteria!r}")
    return Ends(settings.stops, settings.stop_strings, tokenizer, criteria)


def _check(settings: GenerationSettings, prompts: int, mini_batches: int, stream: TextIO | None) -> None:
    """Raise CommandError for settings that do not go with so many prompts, or batches of them."""
    if not 1 <= mini_batches <= prompts:
        raise CommandError(f"mini_batches must be 1 to {prompts}, the prompts, not {mini_batches!r}")
    if stream is not None and (prompts > 1 or settings.num_beams > 1):
        raise CommandError(f"stream must be of one prompt with one beam, not of {prompts} with {settings.num_beams}")
    if mini_batches > 1 and settings.is_sampled:
        raise CommandError("mini_batches must be 1 where tokens are drawn (do_sample): their order would decide")
    if mini_batches > 1 and settings.extras:
        raise CommandError(f"mini_batches must be 1 with {', '.join(settings.extras)}: it is given one batch's rows")
    if settings.fields["prompt_lookup_num_tokens"] and prompts > mini_batches:
        raise CommandError(
            f"prompt_lookup_num_tokens must be None where a batch has several prompts: give mini_batches={prompts}"
        )
