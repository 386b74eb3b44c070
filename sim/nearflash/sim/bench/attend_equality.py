"""Bench `attend`, equality: random heads of all modes through the gateware, against the model, word by word.

Every head runs under every stall pattern of the memory and in two arrival orders of its pages; a mismatch is an output
element or a field of the completion that differs from the model.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import numpy as np

from nearflash.abi.attend.codeword import Owner
from nearflash.abi.config import AttendConfig, attend_config
from nearflash.device.attend import HeadOutput, attend
from nearflash.sim.device import VerilatorDevice
from nearflash.sim.heads import MODES, SimulatedHead, fits, placed, random_head
from nearflash.sim.kernel import MemoryModel

__all__ = ["STALL_PERCENTS", "differences", "equality_rows", "random_heads"]

CONFIG = "attend-tiny"
STALL_PERCENTS = (0, 10, 50, 90)
"""Chance that a memory channel pauses for a cycle; NAND links stall by their own timing."""
ORDERS = (0, 1)
"""Channels by which the pages are turned."""
_DIMS, _GROUPS, _TOKENS_MAX = (64, 80, 128, 256), (1, 4, 8), 4096
_BATCH = 16
_MEMORY_BYTES = 1 << 28


def random_heads(count: int, seed: int, tokens_max: int = _TOKENS_MAX) -> list[SimulatedHead]:
    """`count` heads over all modes, dimensions and group sizes in turn; S uniform in its logarithm."""
    rng = np.random.default_rng(seed)
    kinds = list(product(MODES, _DIMS, _GROUPS))
    heads = []
    for index in range(count):
        mode, dim, group = kinds[index % len(kinds)]
        tokens = int(np.exp(rng.uniform(0, np.log(tokens_max + 1))))
        heads.append(random_head(rng, mode, dim, group, tokens, Owner(index, index % 7, index % 5)))
    return heads


def differences(head: SimulatedHead, output: HeadOutput) -> int:
    """Output elements and completion fields that are not what the model says."""
    expected = head.expected
    completion = expected.completion(head.traffic.all.requests)
    wrong = sum(getattr(output.completion, name) != getattr(completion, name)
                for name in ("faults", "selected", "entries", "pages"))  # fmt: skip
    wrong += output.completion.maximum[: len(head.q)] != completion.maximum
    if output.out is None or expected.out is None:
        return wrong + (output.out is not expected.out) * head.q.size
    return wrong + int((output.out.view(np.uint16) != expected.out.view(np.uint16)).sum())


def equality_rows(count: int = 1008, seed: int = 1, tokens_max: int = _TOKENS_MAX) -> Iterator[dict[str, Any]]:
    """One row a mode, stall pattern and order."""
    heads = random_heads(count, seed, tokens_max)
    batches = [heads[start : start + _BATCH] for start in range(0, len(heads), _BATCH)]
    found: dict[tuple[str, int, int], list[int]] = {}
    with ProcessPoolExecutor(os.cpu_count(), initializer=_open) as pool:
        for results in pool.map(_compare, batches):
            for key, wrong in results:
                found.setdefault(key, []).append(wrong)
    for (mode, stall, order), counts in sorted(found.items()):
        yield {"config": CONFIG, "mode": mode, "heads": len(counts), "mismatches": sum(counts),
               "memory_stall_percent": stall, "arrival_order": order, "tokens": f"1 to {tokens_max}",
               "unit": "output elements and completion fields that differ from the model"}  # fmt: skip


_device: VerilatorDevice


def _open() -> None:
    global _device
    _device = VerilatorDevice(attend_config(CONFIG), memory_bytes=_MEMORY_BYTES)


def _compare(heads: Sequence[SimulatedHead]) -> list[tuple[tuple[str, int, int], int]]:
    config = _device.identity.config
    assert isinstance(config, AttendConfig)
    results = []
    for order in ORDERS:
        for contexts, some in _by_contexts(config, heads):
            with placed(_device, some, turn=order) as operands:
                for stall in STALL_PERCENTS:
                    _device.kernel.configure(MemoryModel(stall_percent=stall, seed=stall + order))
                    outputs = attend(_device, operands, contexts=contexts).heads
                    results += [((head.mode, stall, order), differences(head, output))
                                for head, output in zip(some, outputs, strict=True)]  # fmt: skip
    return results


def _by_contexts(config: AttendConfig, heads: Iterable[SimulatedHead]) -> Iterator[tuple[int, list[SimulatedHead]]]:
    """The heads by the most contexts that they leave room for."""
    by_contexts: dict[int, list[SimulatedHead]] = {}
    for head in heads:
        contexts = config.contexts
        while not fits(config, head.settings, len(head.k), len(head.q), contexts):
            contexts //= 2
        by_contexts.setdefault(contexts, []).append(head)
    yield from by_contexts.items()
