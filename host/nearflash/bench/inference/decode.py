"""One case of bench `generate`: a decode step after contexts on this machine's disk, timed.

full-kv       every step reads all K and V, layer by layer, the next layer ahead (full_kv.py)
full-kv-kept  the same, but for the layers that fit `memory_bytes`
ollm-like     every step reads all K and V of a layer when it comes, once for each query head, as oLLM's disk cache
memory        transformers' DynamicCache, where K and V fit `memory_bytes`
offloaded     the same of a model on a GPU, with K and V in the host's memory
model         attention gives zeros: the model's own time
others        CpuEngine, or GpuEngine, by the policy of that name
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from nearflash.bench.inference.contexts import Contexts
from nearflash.bench.inference.full_kv import FullKvEngine
from nearflash.bench.stopwatch import time_call
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.engines.base import Engine, EngineCounters
from nearflash.inference.engines.paged.engine import PagedEngine
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import CPU, default_layout, open_engine, split_cache
from nearflash.storage.io.profile import DriveProfile
from nearflash.storage.kv import KvLayout

__all__ = ["DecodeCase", "measure", "open_case"]

_REPEATED = "ollm-like"
_OFFLOADED = "offloaded"


@dataclass(frozen=True)
class DecodeCase:
    """A decode step to be measured."""

    name: str
    contexts: Contexts
    memory_bytes: int
    """For K and V, or what an engine keeps of them."""
    policy: AttentionPolicy | None = None
    """Of a CpuEngine."""
    profile: DriveProfile | None = None
    """Of the disk, by which pages are laid out."""
    keeps: bool = False
    """KV page groups, or layers, that were read stay in memory."""
    layout: KvLayout | None = None
    """Of a CpuEngine's pages, in place of what the profile asks for."""
    device: str = CPU
    """Which attends, by a policy."""
    read_ahead: bool = False
    """Of a CpuEngine."""

    @property
    def kv_bytes(self) -> int:
        """K and V of all contexts, fp16."""
        return self.contexts.batch * self.contexts.tokens * self.contexts.shape.token_bytes

    @property
    def pages(self) -> KvLayout:
        """Layout of a CpuEngine's pages."""
        assert self.policy is not None, "of a CpuEngine"
        return self.layout or default_layout(self.contexts.shape.dim, self.policy, self.contexts.tokens, self.profile)


class _Zeros(Engine):
    """No attention at all."""

    name = "model"

    def __init__(self, kv_heads: int) -> None:
        self.kv_heads, self._numbers, self._counters = kv_heads, count(), EngineCounters()
        self.cache_bytes = 0

    def add(self) -> int:
        return next(self._numbers)

    def free(self, sequence: int) -> None:
        pass

    def append(self, sequence: int, layer: int, k: NDArray[np.float16], v: NDArray[np.float16]) -> None:
        pass

    def attend(
        self, layer: int, sequences: Sequence[int], q: NDArray[np.float16], scaling: float | None = None, *,
        softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        return np.zeros(q.shape, np.float32)

    @property
    def counters(self) -> EngineCounters:
        return self._counters

    def close(self) -> None:
        pass


def measure(case: DecodeCase, warm_up: int, steps: int) -> dict[str, Any]:
    """The row of a case: `steps` decode steps, after some that are not counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other cores are for the threads that read, and for those of the engine
    try:
        with _prepare(case) as (step, engine):
            for _ in range(warm_up):
                step()
            before, busy_s = engine.counters + EngineCounters(), time.process_time()
            times = [time_call(step) for _ in range(steps)]
            busy_s = time.process_time() - busy_s
            counters, memory = engine.counters - before, engine.cache_bytes
            suffixes = engine.store.suffix_bytes if isinstance(engine, PagedEngine) else 0
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
        "processor_seconds_of_a_step": busy_s / steps,
        "seconds_of_a_step": {phase: seconds / steps for phase, seconds in counters.seconds.items()},
        "kv_bytes": case.kv_bytes,
        "kv_memory_bytes": memory,
        "kv_suffix_bytes": suffixes,
        "memory_budget_bytes": case.memory_bytes,
        **({} if case.policy is None else {"policy": str(case.policy.mode), "page_bytes": case.pages.page_bytes}),
        **contexts.about,
        "unit": "tokens/s",
    }


@contextmanager
def open_case(case: DecodeCase, folder: Path) -> Iterator[Any]:
    """The case's engine, empty, its file in `folder`."""
    shape, tokens, batch = case.contexts.shape, case.contexts.tokens, case.contexts.batch
    if case.name == "model":
        yield _Zeros(shape.kv_heads)
        return
    if case.policy is None:
        group = case.contexts.group if case.name == _REPEATED else 1
        kept = case.memory_bytes if case.keeps else 0
        with FullKvEngine(
            folder / "kv", shape, sequences=batch, tokens=tokens, cache_bytes=kept, repeat=group, ahead=group == 1
        ) as full:
            yield full
        return
    layout = case.pages
    index, groups = split_cache(case.memory_bytes, shape, layout, tokens, batch)
    with open_engine(
        shape, case.policy, tokens=tokens, sequences=batch, path=folder / "kv", layout=layout,
        cache_bytes=index + groups * case.keeps, device=case.device, read_ahead=case.read_ahead,
    ) as engine:  # fmt: skip
        yield engine


@dataclass
class _InMemory:
    """Counters of a DynamicCache, in place of an engine's."""

    cache_bytes: int
    counters: EngineCounters = field(default_factory=EngineCounters)


@contextmanager
def _prepare(case: DecodeCase) -> Iterator[tuple[Callable[[], None], Any]]:
    """A decode step after the contexts, and the engine."""
    contexts = case.contexts
    if case.name in ("memory", _OFFLOADED):
        kept = DynamicCache(config=contexts.model.config, offloading=case.name == _OFFLOADED)
        for layer in range(contexts.shape.layers):
            k, v = (torch.from_numpy(np.stack(x)).bfloat16() for x in zip(*contexts.kv(layer), strict=True))
            kept.update(k.to(contexts.model.device), v.to(contexts.model.device), layer)
        yield _step(contexts, kept), _InMemory(case.kv_bytes)
        return
    with tempfile.TemporaryDirectory() as folder, open_case(case, Path(folder)) as engine:
        with NearflashCache(engine) as cache:
            for layer in range(contexts.shape.layers):
                for sequence, kv in zip(cache.batch_sequences(contexts.batch), contexts.kv(layer), strict=True):
                    engine.append(sequence, layer, *kv)
            if isinstance(engine, PagedEngine):
                engine.store.flush()
            yield _step(contexts, cache), engine


def _step(contexts: Contexts, cache: Any) -> Callable[[], None]:
    """One token more for each sequence."""
    numbers = count()

    def step() -> None:
        number = next(numbers)
        ids = contexts.ids[:, number : number + 1]
        places = torch.full_like(ids, contexts.place + number)
        with torch.no_grad():
            out = contexts.model(ids, past_key_values=cache, position_ids=places, use_cache=True, logits_to_keep=1)
        out.logits.argmax(-1).tolist()  # a GPU has computed it then

    return step
