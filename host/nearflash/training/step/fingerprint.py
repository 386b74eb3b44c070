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

import numpy as np
import torch

from nearflash.storage.state.fingerprint import MODULUS
from nearflash.training.step.host_memory import KEYS, RUN, WORD_BYTES, Row, is_plain, sums_of

__all__ = ["KEYS", "MODULUS", "RUN", "GradientFingerprints", "fingerprint", "fingerprint_of_copy", "fingerprints"]

BLOCK = 1 << 20
"""Words that a thread takes at once."""


def fingerprint(values: torch.Tensor, first: int = 0) -> int:
    """Fingerprint elements first, first + 1, … of a tensor, which are `values`: of any shape, 2 or 4 bytes each.

    Those of 2 bytes come in pairs: `first` is even, and the number of values too, but at the tensor's end.
    """
    words = _words(values.detach())
    first //= WORD_BYTES // values.element_size()
    if words.is_cuda:
        return _on_gpu(words, first)
    return sums_of([(words.data_ptr(), 0, words.numel(), first)])[0]


def _words(values: torch.Tensor) -> torch.Tensor:
    """The int32 words, (n,), of a tensor, contiguous; of its own memory where that is possible."""
    flat = values.reshape(-1).resolve_neg().contiguous()
    if flat.element_size() == WORD_BYTES:
        return flat.view(torch.int32)
    if flat.numel() % 2:
        return torch.nn.functional.pad(flat.view(torch.int16), (0, 1)).view(torch.int32)
    return (flat.clone() if flat.data_ptr() % WORD_BYTES else flat).view(torch.int32)


def fingerprint_of_copy(source: torch.Tensor, target: torch.Tensor, first: int) -> int:
    """Copy into a part of a tensor, in host memory as `source`; the fingerprint of that part, from the same pass.

    source: of any dtype. first: the place of the part's first element, as in `fingerprint`.
    """
    size_bytes = target.numel() * target.element_size()
    addresses = source.data_ptr(), target.data_ptr()
    plain = source.dtype is target.dtype and is_plain(source) and is_plain(target)
    if not plain or any(number % WORD_BYTES for number in (*addresses, size_bytes)):
        target.copy_(source)
        return fingerprint(target, first)
    return sums_of([(*addresses, size_bytes // WORD_BYTES, first * target.element_size() // WORD_BYTES)])[0]


def fingerprints(tensors: Iterable[torch.Tensor], threads: int | None = None) -> list[int]:
    """One for each tensor; those in host memory on so many threads, on all cores by default."""
    on_gpu: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []
    rows: list[tuple[int, Row]] = []
    for index, tensor in enumerate(tensors):
        if tensor.is_cuda:
            on_gpu[index] = tensor
            continue
        words = _words_of(tensor)
        kept.append(words)
        address, length = words.data_ptr(), words.numel() * words.element_size() // WORD_BYTES
        for first in range(0, length, BLOCK):
            rows.append((index, (address + first * WORD_BYTES, 0, min(BLOCK, length - first), first)))
    results = [0] * (len(on_gpu) + len(kept))
    count = threads or os.cpu_count() or 1
    parts = [rows[part::count] for part in range(count)]
    for part, marks in zip(parts, _on_threads([[row for _, row in part] for part in parts]), strict=True):
        for (index, _), mark in zip(part, marks, strict=True):
            results[index] = (results[index] + mark) % MODULUS
    return [fingerprint(on_gpu[index]) if index in on_gpu else mark for index, mark in enumerate(results)]


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Whole words, a multiple of 4 bytes at one of 4, of a tensor in host memory; of its own memory where possible."""
    values = tensor.detach()
    whole = not (values.numel() * values.element_size() | values.data_ptr()) % WORD_BYTES if is_plain(values) else False
    return values if whole else _words(values)


def _on_threads(tables: list[list[Row]]) -> list[list[int]]:
    if len(tables) == 1:
        return [sums_of(tables[0])]
    with ThreadPoolExecutor(len(tables)) as pool:
        return list(pool.map(sums_of, tables))


class GradientFingerprints:
    """Fingerprints of what was gathered, by tensor, as fp32; from any thread."""

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


def _on_gpu(given: torch.Tensor, first: int) -> int:
    keys = torch.from_numpy(KEYS.astype(np.int64)).to(given.device)
    sums = []
    for start in range(0, given.numel(), BLOCK):
        words = given[start : start + BLOCK].long() & 0xFFFFFFFF
        indices = torch.arange(first + start, first + start + len(words), device=given.device)
        sums.append((words * keys[indices % RUN] * (2 * (indices // RUN) + 1)).sum())
    return sum(torch.stack(sums).tolist()) % MODULUS if sums else 0
