"""Tokens a second with K and V on this machine's disk: all read in every step, or what a policy chooses.

    full-kv       every step reads all K and V, layer by layer, the next layer ahead (full_kv.py)
    full-kv-kept  the same, but for the layers that fit MEMORY_BYTES
    memory        transformers' DynamicCache, where K and V fit MEMORY_BYTES
    sparf         CpuEngine, tokens by approximate scores (1 of 16), from the pages that hold them
    sparf-page    CpuEngine, KV page groups by approximate scores (1 of 8; `-16th`: 1 of 16)

Engines keep the int4 index in memory, an eighth of K and V, and unindexed suffixes (kv_suffix_bytes). In part `text`
they also keep KV page groups that they read, up to MEMORY_BYTES with the index: how often one is wanted again depends
on the text. In the parts of random numbers, where it would depend on nothing real, they keep none. top_k is a count.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from transformers import DynamicCache

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.bench.inference.contexts import Contexts, random_contexts, random_model, text_contexts
from nearflash.bench.inference.full_kv import FullKvEngine
from nearflash.bench.options import Option
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.engines.base import EngineCounters
from nearflash.inference.engines.cpu import CpuEngine
from nearflash.inference.engines.setup import split_cache
from nearflash.inference.models import SMOLLM2, load_model
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.io.queue import QueueBackend
from nearflash.storage.kv import KvLayout, KvShape, KvStore

__all__ = ["run"]

SHAPE = KvShape(layers=30, kv_heads=3, dim=64)
LAYOUT = KvLayout(64, True, 1024, IndexFormat.INT4, 16384)
POLICIES = {
    "sparf": AttentionPolicy(AttentionMode.SPARF, score_dims=16, top_k=1 / 16, local_window=64),
    "sparf-page": AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=16, top_k=1 / 8, local_window=64),
    "sparf-page-16th": AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=16, top_k=1 / 16, local_window=64),
}
CONTEXTS = {"8k": 8192, "32k": 32768}
"""Random ones, by part."""
TEXT = "text"
"""The part of English text: four texts, 32,000 tokens of context."""
BATCH = 4
STEPS = {"8k": (1, 5), "32k": (1, 5), TEXT: (8, 12)}
"""Steps that are not counted, which come first, and steps that are."""
MEMORY_BYTES = 1 << 30
"""For K and V, or what an engine keeps of them."""
_PAGES_PER_BLOCK = 256
_STAGE_BYTES = 16 << 20


@dataclass(frozen=True)
class _Case:
    """What is measured."""

    name: str
    contexts: Contexts
    keeps: bool = False
    """KV page groups that were read stay in memory."""

    @property
    def kv_bytes(self) -> int:
        """K and V of all contexts, fp16."""
        return self.contexts.batch * self.contexts.tokens * SHAPE.token_bytes


def run(
    parts: Annotated[
        Collection[str] | None, Option("Measure these parts (default: all).", many=True, choices=STEPS)
    ] = None,
) -> Iterator[dict[str, Any]]:
    """Rows of each of the `parts` (text, 8k, 32k), and its speedup. Raises CommandError for others."""
    known = [TEXT, *CONTEXTS]
    wanted = known if parts is None else [part for part in known if part in parts]
    if parts is not None and len(wanted) < len(set(parts)):
        raise CommandError(f"parts must be some of {', '.join(known)}, not {', '.join(parts)}")
    for part in wanted:
        rates: dict[str, float] = {}
        try:
            cases = _cases(part)
        except CommandError as error:
            yield {"part": part, "skipped": str(error)}
            continue
        for case in cases:
            row = _measure(case, *STEPS[part])
            rates[case.name] = row["tokens_per_second"]
            yield {"part": part, **row}
        yield {
            "part": part,
            "speedup_sparf_page_over_full_kv": rates["sparf-page"] / rates["full-kv"],
            "speedup_by_case": {name: rate / rates["full-kv"] for name, rate in rates.items()},
            "of": "tokens a second of whole decode steps, median over median, of one run",
        }


def _cases(part: str) -> list[_Case]:
    """What a part measures. Raises CommandError where its model is not there."""
    steps = sum(STEPS[part])
    if part == TEXT:
        contexts = text_contexts(*load_model(SMOLLM2), BATCH, steps)
        return [_Case(name, contexts, keeps=True) for name in ("full-kv", "full-kv-kept", *POLICIES)]
    contexts = random_contexts(random_model(SHAPE), SHAPE, CONTEXTS[part], BATCH, steps)
    cases = [_Case(name, contexts) for name in ("full-kv", "memory", *POLICIES)]
    return [case for case in cases if case.name != "memory" or case.kv_bytes <= MEMORY_BYTES]


def _measure(case: _Case, warm_up: int, steps: int) -> dict[str, Any]:
    """One row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other cores are for the threads that read, and for those of the engine
    try:
        with _prepared(case) as (step, engine):
            for _ in range(warm_up):
                step()
            before = engine.counters + EngineCounters()
            times = [_timed(step) for _ in range(steps)]
            counters, memory = engine.counters - before, engine.cache_bytes
            suffixes = engine.store.suffix_bytes if isinstance(engine, CpuEngine) else 0
    finally:
        torch.set_num_threads(threads)
    contexts, made = case.contexts, steps * case.contexts.batch
    return {
        "case": case.name,
        "context": contexts.tokens,
        "batch": contexts.batch,
        "tokens_per_second": contexts.batch / statistics.median(times),
        "tokens_per_second_least": contexts.batch / max(times),
        "tokens_per_second_most": contexts.batch / min(times),
        "steps": steps,
        "flash_bytes_per_token": sum(counters.flash_bytes.values()) / made,
        "flash_bytes_by_kind": {kind: size / made for kind, size in counters.flash_bytes.items()},
        "seconds_of_a_step": {phase: seconds / steps for phase, seconds in counters.seconds.items()},
        "kv_bytes": case.kv_bytes,
        "kv_memory_bytes": memory,
        "kv_suffix_bytes": suffixes,
        "memory_budget_bytes": MEMORY_BYTES,
        **contexts.about,
        "unit": "tokens/s",
    }


@dataclass
class _InMemory:
    """What a DynamicCache has in place of an engine."""

    cache_bytes: int
    counters: EngineCounters = field(default_factory=EngineCounters)


@contextmanager
def _prepared(case: _Case) -> Iterator[tuple[Callable[[], None], Any]]:
    """A decode step after the contexts, and the engine."""
    contexts = case.contexts
    if case.name == "memory":
        kept = DynamicCache(config=contexts.model.config)
        for layer in range(SHAPE.layers):
            k, v = (torch.from_numpy(np.stack(x)).bfloat16() for x in zip(*contexts.kv(layer), strict=True))
            kept.update(k, v, layer)
        yield _step(contexts, kept), _InMemory(case.kv_bytes)
        return
    with tempfile.TemporaryDirectory() as folder, _engine(Path(folder), case) as engine:
        with NearflashCache(engine) as cache:
            for layer in range(SHAPE.layers):
                for sequence, kv in zip(cache.batch_sequences(contexts.batch), contexts.kv(layer), strict=True):
                    engine.append(sequence, layer, *kv)
            if isinstance(engine, CpuEngine):
                engine.store.flush()
            yield _step(contexts, cache), engine


def _engine(folder: Path, case: _Case) -> CpuEngine | FullKvEngine:
    tokens, batch = case.contexts.tokens, case.contexts.batch
    if case.name not in POLICIES:
        kept = MEMORY_BYTES if case.name == "full-kv-kept" else 0
        return FullKvEngine(folder / "kv", SHAPE, sequences=batch, tokens=tokens, cache_bytes=kept)
    pages = batch * SHAPE.layers * SHAPE.kv_heads * (tokens // LAYOUT.group_tokens) * 9 // 8
    blocks = -(-pages // _PAGES_PER_BLOCK) + 8
    flash = FileFlash.create(
        folder / "kv", FlashGeometry(LAYOUT.page_bytes, _PAGES_PER_BLOCK, 1, 1, blocks), backend=QueueBackend()
    )
    store = KvStore(flash, SHAPE, LAYOUT, buffer_bytes=_STAGE_BYTES)
    index, groups = split_cache(MEMORY_BYTES, SHAPE, LAYOUT, tokens, batch)
    return CpuEngine(store, POLICIES[case.name], index_cache_bytes=index, page_cache_bytes=groups if case.keeps else 0)


def _step(contexts: Contexts, cache: Any) -> Callable[[], None]:
    """One token more for each sequence."""
    numbers = count()

    def step() -> None:
        number = next(numbers)
        places = torch.full((contexts.batch, 1), contexts.place + number)
        ids = contexts.ids[:, number : number + 1]
        with torch.no_grad():
            contexts.model(ids, past_key_values=cache, position_ids=places, use_cache=True, logits_to_keep=1)

    return step


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
