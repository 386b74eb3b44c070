"""Fingerprints of tensors' contents: they tell whether anything has changed that torch's version counts do not see.

`tensor.data`, numpy views and collectives (`dist.all_reduce(p.grad)`) write without a new version. The fingerprint is

    sum over i of w[i] · KEYS[i mod RUN] · (2 · (i div RUN) + 1)      modulo 2^64

with odd 32-bit KEYS and the tensor's bytes as little-endian words w of 32 bits, the last one filled up with zeros: one
fp32 number each, or two of 16 bits, since the product is what takes the time.

A change of one element always changes it, any other but for one in about 2^32. It is linear, so
the parts of a tensor may be summed in any order.

Source: multilinear hashing (Carter and Wegman 1979; Lemire and Kaser, "Strongly universal string hashing is fast").
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
import torch

from nearflash.device.backends.host.vector.compiled import compiled

__all__ = ["KEYS", "MODULUS", "RUN", "GradientFingerprints", "fingerprint", "fingerprints"]

RUN = 1 << 10
"""Words that share a factor."""
KEYS = np.random.Generator(np.random.PCG64(0x6E66)).integers(0, 1 << 32, RUN, dtype=np.uint32) | np.uint32(1)
MODULUS = 1 << 64
BLOCK = 1 << 20
"""Elements that a thread takes at once."""
_WORD_BYTES = 4


def fingerprint(values: torch.Tensor, first: int = 0) -> int:
    """Of elements first, first + 1, … of a tensor, which are `values`: of any shape, 2 or 4 bytes each.

    Those of 2 bytes come in pairs: `first` is even, and the number of values too, but at the tensor's end.
    """
    words = _words(values.detach().reshape(-1).resolve_neg())
    first //= _WORD_BYTES // values.element_size()
    if words.is_cuda:
        return _on_gpu(words, first)
    return int(_sum(words.numpy().view(np.uint32), KEYS, first))


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The int32 words, (n,), of a contiguous tensor; of its own memory where that is possible."""
    if flat.element_size() == _WORD_BYTES:
        return flat.view(torch.int32)
    if flat.numel() % 2:
        return torch.nn.functional.pad(flat.view(torch.int16), (0, 1)).view(torch.int32)
    return (flat.clone() if flat.data_ptr() % _WORD_BYTES else flat).view(torch.int32)


def fingerprints(tensors: Iterable[torch.Tensor], threads: int | None = None) -> list[int]:
    """One for each tensor; those in host memory on so many threads, on all cores by default."""
    tensors = list(tensors)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        futures = []
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            starts = range(0, flat.numel(), BLOCK) if not flat.is_cuda else ()
            futures.append([pool.submit(fingerprint, flat[start : start + BLOCK], start) for start in starts])
        on_gpu = [fingerprint(tensor) if tensor.is_cuda else 0 for tensor in tensors]
        parts = zip(on_gpu, futures, strict=True)
        return [(gpu + sum(future.result() for future in blocks)) % MODULUS for gpu, blocks in parts]


class GradientFingerprints:
    """Of what was gathered, by tensor, as fp32; from any thread."""

    def __init__(self) -> None:
        self._sums: defaultdict[int, int] = defaultdict(int)
        self._lock = Lock()

    def add(self, tensor: int, first: int, gathered: torch.Tensor) -> None:
        """Elements first, first + 1, … of a tensor's gradient, rounded to fp32."""
        part = fingerprint(gathered, first)
        with self._lock:
            self._sums[tensor] = (self._sums[tensor] + part) % MODULUS

    def agree(self, today: Mapping[int, int]) -> bool:
        """Whether every tensor's gradient is still the one that was gathered."""
        return all(self._sums[tensor] == value for tensor, value in today.items())


@compiled
def _sum(words: Any, keys: Any, first: Any) -> Any:
    total, place = np.uint64(0), 0
    while place < words.size:
        run, phase = divmod(first + place, RUN)
        length = min(RUN - phase, words.size - place)
        x, k, part = words[place : place + length], keys[phase : phase + length], np.uint64(0)
        for i in range(length):
            part += np.uint64(x[i]) * np.uint64(k[i])
        total += part * np.uint64(2 * run + 1)
        place += length
    return total


def _on_gpu(given: torch.Tensor, first: int) -> int:
    keys = torch.from_numpy(KEYS.astype(np.int64)).to(given.device)
    sums = []
    for start in range(0, given.numel(), BLOCK):
        words = given[start : start + BLOCK].long() & 0xFFFFFFFF
        place = torch.arange(first + start, first + start + len(words), device=given.device)
        sums.append((words * keys[place % RUN] * (2 * (place // RUN) + 1)).sum())
    return sum(torch.stack(sums).tolist()) % MODULUS if sums else 0
