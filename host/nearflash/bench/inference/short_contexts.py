"""Short contexts: time of a token with K and V near storage against transformers' own cache, in one run.

Both take the same model in fp32, on as many threads as torch has, one sequence, tokens in turn: a step of one, a step
of the other, so that another load of the machine meets both. Case `busy`: a process that computes without end on each
processor is that load.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import torch
from transformers import DynamicCache

from nearflash.inference.cache.attention import NAME
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.models import kv_shape
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import open_engine

__all__ = ["short_contexts"]

TOKENS = (50, 500)
STEPS = 40


def short_contexts(model: Any, tokens: tuple[int, ...] = TOKENS, steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """A row for each context and load: `short_context_fraction`, of transformers' tokens a second."""
    model = model.float()
    for case, context in product(("idle", "busy"), tokens):
        with open_engine(kv_shape(model), AttentionPolicy(), tokens=context + steps + 1, sequences=1) as engine:
            with NearflashCache(engine, model.config) as cache, _load() if case == "busy" else nullcontext():
                ours, theirs = _times(model, cache, context, steps)
        yield {
            "case": case,
            "context": context,
            "short_context_fraction": theirs / ours,
            "milliseconds_a_token": 1e3 * ours,
            "milliseconds_a_token_dynamic_cache": 1e3 * theirs,
            "steps": steps,
            "threads": torch.get_num_threads(),
            "of": "tokens a second of transformers' DynamicCache, medians of one run; fp32, one sequence",
        }


@contextmanager
def _load() -> Iterator[None]:
    """A busy process for each processor."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _times(model: Any, cache: Any, context: int, steps: int) -> tuple[float, float]:
    """Median seconds of a step after so many tokens: with the cache, with a DynamicCache."""
    torch.manual_seed(0)
    ids = torch.randint(model.config.get_text_config(decoder=True).vocab_size, (1, context))
    ours: list[float] = []
    theirs: list[float] = []
    caches = ((NAME, cache, ours), ("sdpa", DynamicCache(config=model.config), theirs))
    try:
        with torch.no_grad():
            for step in range(steps + 1):
                for attention, kept, spent in caches:
                    model.set_attn_implementation(attention)
                    start = time.perf_counter()
                    model(ids if not step else ids[:, step : step + 1], past_key_values=kept, logits_to_keep=1)
                    if step:
                        spent.append(time.perf_counter() - start)
    finally:
        model.set_attn_implementation(NAME)
    return statistics.median(ours), statistics.median(theirs)
