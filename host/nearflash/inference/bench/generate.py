"""Tokens a second with K and V on this machine's disk: all read in every step, or what a policy chooses.

    full-kv      every step reads all K and V, layer by layer, the next layer ahead (full_kv.py)
    memory       transformers' DynamicCache, where K and V fit MEMORY_BYTES
    sparf        HostEngine, tokens by approximate scores (1 of 16), from the pages that hold them
    sparf-page   HostEngine, whole token groups by approximate scores (1 of 8; `-16th`: 1 of 16)

Engines keep the int4 index in memory (kv_memory_bytes), an eighth of K and V, and tails (kv_tail_bytes); full-kv two
layers' K and V.
The model has the shape of SmolLM2-135M with random weights, in bf16; K and V of the context are random numbers that are
appended to the engines directly, as nothing that is timed depends on their values: budgets are by count.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from nearflash.abi.attend.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.inference.attention import attach
from nearflash.inference.bench.full_kv import FullKvEngine
from nearflash.inference.cache import NearflashCache
from nearflash.inference.engine import EngineCounters
from nearflash.inference.host_engine import HostEngine
from nearflash.inference.policy import AttentionMode, AttentionPolicy
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, KvStore
from nearflash.storage.queue import QueueEngine

__all__ = ["run"]

F16 = NDArray[np.float16]
SHAPE = KvShape(layers=30, kv_heads=3, dim=64)
LAYOUT = KvLayout(64, True, 1024, IndexFormat.INT4, 16384)
POLICIES = {
    "sparf": AttentionPolicy(AttentionMode.SPARF, channels=16, budget=1 / 16, local=64),
    "sparf-page": AttentionPolicy(AttentionMode.SPARF_PAGE, channels=16, budget=1 / 8, local=64),
    "sparf-page-16th": AttentionPolicy(AttentionMode.SPARF_PAGE, channels=16, budget=1 / 16, local=64),
}
CONTEXTS = {"8k": 8192, "32k": 32768}
BATCH = 4
STEPS = 5
"""Counted, behind one that is not."""
MEMORY_BYTES = 1 << 30
"""For K and V, or what an engine keeps of them."""
_PAGES_PER_BLOCK = 256
_STAGE_BYTES = 16 << 20


@dataclass(frozen=True)
class _Case:
    """What is measured."""

    name: str
    tokens: int
    """Of the context of each sequence."""
    batch: int

    @property
    def kv_bytes(self) -> int:
        """K and V of all contexts, fp16."""
        return self.batch * self.tokens * SHAPE.token_bytes


def run(parts: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of each context (the `parts`: 8k, 32k), and the speedup of the longest. Raises CommandError."""
    wanted = list(CONTEXTS if parts is None else parts)
    if not set(wanted) <= set(CONTEXTS):
        raise CommandError(f"parts must be some of {', '.join(CONTEXTS)}, not {', '.join(wanted)}")
    model = _model()
    for part in wanted:
        rates: dict[str, float] = {}
        for name in ("full-kv", "memory", *POLICIES):
            case = _Case(name, CONTEXTS[part], BATCH)
            if name != "memory" or case.kv_bytes <= MEMORY_BYTES:
                row = _measure(model, case)
                rates[name] = row["tokens_per_second"]
                yield {"part": part, **row}
        yield {
            "part": part,
            "speedup_sparf_page_over_full_kv": rates["sparf-page"] / rates["full-kv"],
            "speedup_by_case": {name: rate / rates["full-kv"] for name, rate in rates.items()},
            "of": "tokens a second of whole decode steps, median over median, of one run",
        }


def _measure(model: Any, case: _Case) -> dict[str, Any]:
    """One row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other cores are for the threads that read, and for those of the engine
    try:
        with _prepared(model, case) as (step, engine):
            step()
            before = engine.counters + EngineCounters()
            times = [_timed(step) for _ in range(STEPS)]
            counters, memory = engine.counters - before, engine.memory_bytes
            tails = engine.store.tail_bytes if isinstance(engine, HostEngine) else 0
    finally:
        torch.set_num_threads(threads)
    made = STEPS * case.batch
    return {
        "case": case.name,
        "context": case.tokens,
        "batch": case.batch,
        "tokens_per_second": case.batch / statistics.median(times),
        "tokens_per_second_least": case.batch / max(times),
        "tokens_per_second_most": case.batch / min(times),
        "steps": STEPS,
        "flash_bytes_per_token": sum(counters.flash_bytes.values()) / made,
        "flash_bytes_by_kind": {kind: size / made for kind, size in counters.flash_bytes.items()},
        "seconds_of_a_step": {phase: seconds / STEPS for phase, seconds in counters.seconds.items()},
        "kv_bytes": case.kv_bytes,
        "kv_memory_bytes": memory,
        "kv_tail_bytes": tails,
        "memory_budget_bytes": MEMORY_BYTES,
        "model": "shape of SmolLM2-135M, random weights, bf16, one thread",
        "kv": "random numbers, appended directly",
        "unit": "tokens/s",
    }


@dataclass
class _InMemory:
    """What a DynamicCache has in place of an engine."""

    memory_bytes: int
    counters: EngineCounters = field(default_factory=EngineCounters)


@contextmanager
def _prepared(model: Any, case: _Case) -> Iterator[tuple[Callable[[], None], Any]]:
    """A decode step behind `case.tokens` tokens of context, and the engine."""
    if case.name == "memory":
        kept = DynamicCache(config=model.config)
        for layer in range(SHAPE.layers):
            k, v = (torch.from_numpy(np.stack(x)).bfloat16() for x in zip(*_contexts(case, layer), strict=True))
            kept.update(k, v, layer)
        yield _step(model, kept, case), _InMemory(case.kv_bytes)
        return
    with tempfile.TemporaryDirectory() as folder, _engine(Path(folder), case) as engine:
        with NearflashCache(engine) as cache:
            for layer in range(SHAPE.layers):
                for sequence, (keys, values) in zip(cache.rows(case.batch), _contexts(case, layer), strict=True):
                    engine.append(sequence, layer, keys, values)
            if isinstance(engine, HostEngine):
                engine.store.flush()
            yield _step(model, cache, case), engine


def _engine(folder: Path, case: _Case) -> HostEngine | FullKvEngine:
    if case.name == "full-kv":
        return FullKvEngine(folder / "kv", SHAPE, sequences=case.batch, tokens=case.tokens)
    pages = case.batch * SHAPE.layers * SHAPE.kv_heads * (case.tokens // LAYOUT.group_tokens) * 9 // 8
    blocks = -(-pages // _PAGES_PER_BLOCK) + 8
    flash = FileFlash.create(
        folder / "kv", FlashGeometry(LAYOUT.page_bytes, _PAGES_PER_BLOCK, 1, 1, blocks), engine=QueueEngine()
    )
    store = KvStore(flash, SHAPE, LAYOUT, buffer_bytes=_STAGE_BYTES)
    return HostEngine(store, POLICIES[case.name], index_bytes=MEMORY_BYTES)


def _step(model: Any, cache: Any, case: _Case) -> Callable[[], None]:
    """One token more for each sequence."""
    places = count(case.tokens)

    def step() -> None:
        place = torch.full((case.batch, 1), next(places))
        with torch.no_grad():
            model(torch.ones_like(place), past_key_values=cache, position_ids=place, use_cache=True, logits_to_keep=1)

    return step


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _contexts(case: _Case, layer: int) -> Iterator[tuple[F16, F16]]:
    """K and V (heads, tokens, d) of each sequence: normal numbers, some channels of K four times as large."""
    rng = np.random.default_rng(layer)
    k, v = (rng.standard_normal((SHAPE.kv_heads, case.tokens, SHAPE.dim), np.float32) for _ in range(2))
    k[..., rng.choice(SHAPE.dim, SHAPE.dim // 8, replace=False)] *= 4
    for sequence in range(case.batch):
        turned = (np.roll(x.astype(np.float16), 31 * sequence, axis=1) for x in (k, v))
        yield next(turned), next(turned)


def _model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=SHAPE.layers, num_attention_heads=9,
        num_key_value_heads=SHAPE.kv_heads, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=1 << 16,
    )  # fmt: skip
    return attach(LlamaForCausalLM(config).eval().bfloat16())
