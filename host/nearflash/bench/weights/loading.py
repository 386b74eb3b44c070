"""Dense tensors of a model's layers from the disk, one after another: stored dense, and compressed, pruned or not.

Each pass takes all linear weights of the decoder layers from a WeightsMap in the model's order, as a forward pass does,
and drops each at once. Nothing is kept in memory and reads go past the page cache. The cases are interleaved; the first
pass of each, which gets memory from the system, does not count. Beside them, the disk's rate alone and while all cores
expand one tensor from memory again and again: less memory moves then than in a pass, so a pass can read less still.
"""

import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.bench.disk import disk_rate
from nearflash.bench.weights.forward import DENSE, LargeModel
from nearflash.support.threads import CallingThread
from nearflash.weights import expand, open_checkpoint
from nearflash.weights.file import WeightsTensor
from nearflash.weights.weights_map import KeptTensor, WeightsMap

__all__ = ["measure"]

_REPEATS = 7


def measure(folders: LargeModel, path: Path) -> Iterator[dict[str, Any]]:
    """A row for each format; `speedup_over_bytes_ratio` is 1 where the time shrinks as the bytes do."""
    seconds: dict[str, list[float]] = {format: [] for format in folders.formats}
    tensors = {format: _tensors(folder, folders.names) for format, folder in folders.formats.items()}
    rate = disk_rate(path)
    with ExitStack() as stack:
        maps = {format: stack.enter_context(WeightsMap(kept)) for format, kept in tensors.items()}
        for _ in range(_REPEATS + 1):
            for format, weights in maps.items():
                seconds[format].append(_pass(weights))
    stored = {format: sum(tensor.stored_bytes for tensor in kept.values()) for format, kept in tensors.items()}
    dense = sum(tensor.dense_bytes for tensor in tensors[DENSE].values())
    medians = {format: statistics.median(times[1:]) for format, times in seconds.items()}
    for format, times in seconds.items():
        speedup, read = medians[DENSE] / medians[format], stored[format] / medians[format] / 1e9
        beside = rate if format == DENSE else _rate_beside(path, list(tensors[format].values()))
        yield {
            "format": format,
            "dtype": "bf16",
            "bytes_fraction": stored[format] / dense,
            "of": "dense 16-bit bytes",
            "seconds": medians[format],
            "seconds_range": [min(times[1:]), max(times[1:])],
            "output_gbps": dense / medians[format] / 1e9,
            "read_gbps": read,
            "disk_read_gbps": rate,
            "disk_read_gbps_beside_expanding": beside,
            "read_over_disk_beside": read / beside,
            "speedup_over_dense": speedup,
            "bytes_ratio": stored[DENSE] / stored[format],
            "speedup_over_bytes_ratio": speedup * stored[format] / stored[DENSE],
        }


def _tensors(folder: Path, names: Sequence[str]) -> dict[str, WeightsTensor]:
    every = open_checkpoint(folder)
    return {name: every[name] for name in names}


def _pass(weights: WeightsMap) -> float:
    """Seconds of reading and expanding all of it once."""
    start = time.perf_counter()
    for name in weights:
        weights[name]
    return time.perf_counter() - start


def _rate_beside(path: Path, tensors: Sequence[WeightsTensor]) -> float:
    """GB/s of the disk while every core expands the largest of the tensors from memory."""
    kept, stop = KeptTensor(max(tensors, key=lambda tensor: tensor.dense_bytes)), threading.Event()

    def work() -> None:
        out = np.empty(kept.shape, np.uint16)
        while not stop.is_set():
            expand(kept, out=out, executor=CallingThread())

    threads = [threading.Thread(target=work) for _ in range(os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    try:
        return disk_rate(path)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
