"""Decode steps of a model on a GPU: K and V in its memory, in the host's, or on disk; all, or what a policy chooses.

memory        transformers' DynamicCache in the GPU's memory
offloaded     the same in the host's memory, each layer copied when it comes (DynamicCache(offloading=True))
dense         GpuEngine that reads all K and V from disk
others        GpuEngine by the policy of that name: nothing kept but the index, or (`-kept`) KV page groups, too
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from nearflash.bench.inference.contexts import Contexts
from nearflash.bench.inference.decode import DecodeCase, measure
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import CUDA
from nearflash.storage.io.profile import DriveProfile

__all__ = ["NO_GPU", "on_gpu"]

NO_GPU = "torch finds no GPU"


def on_gpu(
    contexts: Contexts, policies: Mapping[str, AttentionPolicy], memory_bytes: int, profile: DriveProfile,
    steps: tuple[int, int],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a case, and the last one of their ratios; the model goes to the GPU."""
    contexts.model.to(CUDA)
    about = {**contexts.about, "gpu": torch.cuda.get_device_name()}
    contexts = replace(contexts, ids=contexts.ids.to(CUDA), about=about)
    cases = [DecodeCase(name, contexts, memory_bytes) for name in ("memory", "offloaded")]
    for name, policy in {"dense": AttentionPolicy(), **policies}.items():
        cases.append(DecodeCase(name, contexts, memory_bytes, policy, profile, device=CUDA))
        if name != "dense":
            cases.append(replace(cases[-1], name=f"{name}-kept", keeps=True))
    speeds = {}
    for case in cases:
        torch.cuda.reset_peak_memory_stats()
        row = measure(case, *steps)
        speeds[case.name] = row["tokens_per_second"]
        yield row | {"gpu_peak_bytes": torch.cuda.max_memory_allocated()}
    yield {
        "speedup_over_offloaded": {name: speed / speeds["offloaded"] for name, speed in speeds.items()},
        "fraction_of_memory": {name: speed / speeds["memory"] for name, speed in speeds.items()},
        "of": "tokens a second of whole decode steps, median over median, of one run",
    }
