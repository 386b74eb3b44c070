"""Attention to what is in memory against a plain read of the same bytes: how near the engine's own work is to memory.

The same query twice: the second time all that it asks for is there. Its bytes: index rows of the score's dims, and
the chosen KV page groups, once each.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.bench.inference.contexts import default_config, random_contexts, random_model
from nearflash.bench.inference.decode import DecodeCase, open_case
from nearflash.bench.stopwatch import time_call
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.io.profile import DriveProfile

__all__ = ["memory_reads"]

TOKENS, SEQUENCES, LAYERS, REPEATS = 32768, 4, 3, 9
_BUFFER_BYTES = 512 << 20


def memory_reads(policy: AttentionPolicy, profile: DriveProfile, tokens: int = TOKENS) -> dict[str, Any]:
    """One row: `memory_read_fraction`, seconds of a plain read over those of scoring, choosing and attending."""
    contexts = random_contexts(random_model(default_config(LAYERS)), tokens, SEQUENCES, 1)
    shape, layers = contexts.shape, range(LAYERS)
    case = DecodeCase("memory", contexts, 4 * SEQUENCES * tokens * shape.token_bytes, policy, profile, keeps=True)
    q = np.random.default_rng(1).standard_normal((SEQUENCES, shape.kv_heads, contexts.group, shape.dim))
    with tempfile.TemporaryDirectory() as folder, open_case(case, Path(folder)) as engine:
        numbers = [engine.add() for _ in range(SEQUENCES)]
        for layer in layers:
            for number, kv in zip(numbers, contexts.kv(layer), strict=True):
                engine.append(number, layer, *kv)
        engine.store.flush()
        asked = engine.counters.flash_bytes.get("token", 0)
        query = q.astype(np.float16)
        times = [
            time_call(lambda: [engine.attend(layer, numbers, query) for layer in layers]) for _ in range(REPEATS + 1)
        ]
        chosen = engine.counters.flash_bytes["token"] - asked
    rows = policy.resolve(tokens, shape.dim, case.pages).score_dims
    scored = rows * tokens * case.pages.index_format.bits // 8 * SEQUENCES * shape.kv_heads * LAYERS
    attend_s, rate = statistics.median(times[1:]), _memory_rate()
    heads = SEQUENCES * shape.kv_heads * LAYERS
    return {
        "case": "memory",
        "context": tokens,
        "page_bytes": case.pages.page_bytes,
        "memory_read_fraction": (chosen + scored) / rate / attend_s,
        "microseconds_a_head": 1e6 * attend_s / heads,
        "bytes_a_head": {"chosen": chosen / heads, "index": scored / heads},
        "memory_gigabytes_per_second": rate / 1e9,
        "of": "time of a plain read of these bytes by one thread (numpy's sum of 64-bit integers), one run, medians",
    }


def _memory_rate() -> float:
    """Bytes a second of one thread that adds up a large array."""
    words = np.ones(_BUFFER_BYTES // 8, np.int64)
    return words.nbytes / statistics.median(time_call(words.sum) for _ in range(5))
