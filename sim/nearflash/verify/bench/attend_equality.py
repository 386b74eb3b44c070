"""Bench `attend`, equality: random heads of all modes through the gateware, against the model, word by word.

Every head runs under every stall pattern of the memory and in two arrival orders of its pages. S is uniform in its
logarithm, from 1 to 4,096 or to where S·g·d reaches a limit; the first head of each kind has the higher limit. A
mismatch is a head with an output element or a field of its completion that differs from the model.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import numpy as np

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.kernel.config import AttendConfig, attend_config
from nearflash.device.drivers.attend import attend
from nearflash.model.attention.memory.settings import Addresses
from nearflash.model.attention.random_vectors import MODES, random_mode_vector
from nearflash.model.attention.vectors import TestVector, differences
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.heads import place_heads
from nearflash.sim.verilator.kernel import MemoryModel

__all__ = ["ORDERS", "STALL_PERCENTS", "equality_rows", "random_heads"]

CONFIG = "attend-tiny"
STALL_PERCENTS = (0, 10, 50, 90)
"""Chance that a memory channel pauses for a cycle; NAND links pause by their own timing."""
ORDERS = (0, 1)
"""Channels by which the pages are turned."""
_KINDS = tuple(product(MODES, (64, 80, 128, 256), (1, 4, 8)))
_TOKENS_MAX, _SIZE_MAX, _FIRST_SIZE_MAX = 4096, 1 << 17, 1 << 20
_BATCH, _MEMORY_BYTES = 16, 1 << 28
_Named = tuple[str, TestVector]
_Way = tuple[int, int]


def random_heads(count: int, seed: int) -> list[_Named]:
    """`count` heads with the names of their modes, over all modes, dimensions and group sizes in turn."""
    rng = np.random.default_rng(seed)
    heads = []
    for index in range(count):
        mode, dim, group = _KINDS[index % len(_KINDS)]
        size = _FIRST_SIZE_MAX if index < len(_KINDS) else _SIZE_MAX
        tokens = int(np.exp(rng.uniform(0, np.log(min(_TOKENS_MAX, size // (dim * group)) + 1))))
        heads.append((mode, random_mode_vector(rng, mode, dim, group, tokens, PageTag(index, index % 7, index % 5))))
    return heads


def equality_rows(count: int = 21 * len(_KINDS), seed: int = 1, *, everywhere: bool = True) -> Iterator[dict[str, Any]]:
    """One row a mode, stall pattern and order; each head in all of them, or, not `everywhere`, in one in turn."""
    heads = random_heads(count, seed)
    ways = list(product(ORDERS, STALL_PERCENTS))
    batches = [
        (heads[start : start + _BATCH], ways if everywhere else ways[start // _BATCH % len(ways) :][:1])
        for start in range(0, len(heads), _BATCH)
    ]
    mismatches_by_mode: dict[tuple[str, int, int], list[tuple[int, bool]]] = {}
    _open_device().close()  # built once, before the processes want it
    # Forked processes would inherit locks that threads of this one hold, and wait for them for ever.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), initializer=_open) as pool:
        for results in pool.map(_compare, batches):
            for key, tokens, wrong in results:
                mismatches_by_mode.setdefault(key, []).append((tokens, wrong))
    for (mode, stall, order), ended in sorted(mismatches_by_mode.items()):
        yield {"config": CONFIG, "mode": mode, "heads": len(ended), "mismatches": sum(wrong for _, wrong in ended),
               "memory_stall_percent": stall, "arrival_order": order, "tokens_max": max(tokens for tokens, _ in ended),
               "unit": "heads with any output element or completion field that differs from the model"}  # fmt: skip


_device: VerilatorDevice


def _open_device() -> VerilatorDevice:
    return VerilatorDevice(attend_config(CONFIG), memory_bytes=_MEMORY_BYTES)


def _open() -> None:
    global _device
    _device = _open_device()


def _compare(batch: tuple[Sequence[_Named], Sequence[_Way]]) -> list[tuple[tuple[str, int, int], int, bool]]:
    """(mode, stall pattern, order), S, and whether anything differs, of each run of each head."""
    config = _device.identity.config
    assert isinstance(config, AttendConfig)
    heads, ways = batch
    results = []
    by_contexts: dict[int, list[_Named]] = {}
    for head in heads:
        by_contexts.setdefault(_contexts(config, head[1]), []).append(head)
    for (order, stall), (contexts, some) in product(ways, by_contexts.items()):
        with place_heads(_device, (vector for _, vector in some), turn=order) as operands:
            _device.kernel.configure(MemoryModel(stall_percent=stall, seed=stall + order))
            outputs = attend(_device, operands, contexts=contexts, watchdog_cycles=1_000_000).heads
            results += [
                ((mode, stall, order), len(vector.k), bool(differences(vector, one.completion, one.out, repeated=True)))
                for (mode, vector), one in zip(some, outputs, strict=True)
            ]
    return results


def _contexts(config: AttendConfig, vector: TestVector) -> int:
    """The most contexts that leave room for the head."""
    head = vector.settings.descriptor(vector.page_tag, len(vector.k), len(vector.q), Addresses())
    contexts = config.contexts
    while not head.fits(config, contexts):
        contexts //= 2
    return contexts
