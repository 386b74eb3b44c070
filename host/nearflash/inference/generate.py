"""Texts continued with KV near storage: what `nearflash generate` does, as a function."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from transformers import StoppingCriteriaList

from nearflash.abi.errors import CommandError
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.engines.base import Engine, EngineCounters
from nearflash.inference.progress import Clock, Progress, TextOut, Tick

__all__ = ["Generated", "generate", "until_end"]


@dataclass(frozen=True)
class Generated:
    """What came of the prompts, in their order."""

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
    model: Any, tokenizer: Any, prompts: Sequence[str], engine: Engine, *, max_new_tokens: int = 64,
    mini_batches: int = 1, chat: bool = False, progress: Callable[[Progress], None] | None = None,
    stream: TextIO | None = None, seed: int | None = None, **options: Any,
) -> Generated:  # fmt: skip
    """Continue all prompts as one batch, greedily unless `options` of model.generate state otherwise.

    With several `mini_batches` of prompts each runs in a thread of its own: one computes while another is attended to.
    `chat` wraps each prompt as a user's message by the tokenizer's template. The text of a single prompt goes to
    `stream` as it comes. `seed`: torch's, where `options` have tokens drawn. Raises CommandError for no prompts, empty
    ones, more mini-batches than prompts, or a tokenizer without a template; what cache, engine and model raise.
    An interrupt ends it with the token that it is at.
    """
    if max_new_tokens < 1:
        raise CommandError(f"max_new_tokens must be 1 or more, not {max_new_tokens!r}")
    if not prompts:
        raise CommandError("prompts must be at least one, not none")
    if not 1 <= mini_batches <= len(prompts):
        raise CommandError(f"mini_batches must be 1 to {len(prompts)}, the prompts, not {mini_batches!r}")
    if stream is not None and len(prompts) > 1:
        raise CommandError(f"stream must be of one prompt, not of {len(prompts)}")
    attach(model)
    texts = [_as_message(tokenizer, prompt) for prompt in prompts] if chat else list(prompts)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id} | options
    before = engine.counters + EngineCounters()
    clock = Clock(engine, before, len(prompts), mini_batches, max_new_tokens, progress)

    def run(part: int) -> list[list[int]]:
        batch = tokenizer(
            texts[part::mini_batches], return_tensors="pt", padding=True, return_token_type_ids=False,
            add_special_tokens=not chat,
        ).to(model.device)  # fmt: skip
        if batch["input_ids"].shape[1] == 0:
            raise CommandError("prompts must have a token at least, but all of a mini-batch are empty")
        stops = StoppingCriteriaList([Tick(clock, part)])
        with NearflashCache(engine, model.config) as cache:
            shown = None if stream is None else TextOut(tokenizer, stream)
            out = model.generate(**batch, past_key_values=cache, stopping_criteria=stops, streamer=shown, **settings)
        return [until_end(row, model) for row in out[:, batch["input_ids"].shape[1] :].tolist()]

    if seed is not None:
        torch.manual_seed(seed)
    with ThreadPoolExecutor(mini_batches, "mini-batch") as pool:
        futures = [pool.submit(run, part) for part in range(mini_batches)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            clock.stopped = True  # after an interrupt, or an error of one of them, the others are not waited for long
        parts = [future.result() for future in futures]
    tokens = [parts[place % mini_batches][place // mini_batches] for place in range(len(prompts))]
    return Generated(
        tokenizer.batch_decode(tokens, skip_special_tokens=True), tokens, clock.prefill_s, clock.decode_s,
        engine.counters - before,
    )  # fmt: skip


def _as_message(tokenizer: Any, prompt: str) -> str:
    if not tokenizer.chat_template:
        raise CommandError("chat must be False for a model whose tokenizer has no template, not True")
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def until_end(tokens: list[int], model: Any) -> list[int]:
    """Tokens up to the first end-of-text token, that one included."""
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]
