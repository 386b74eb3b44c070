"""Dense tensors of a model's layers from the disk, one after another: stored dense, and compressed.

Each pass takes all linear weights of the decoder layers from a WeightsMap in the model's order, as a forward pass does,
and drops each at once. Nothing is kept in memory and reads go past the page cache. The cases are interleaved.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nearflash.bench.weights.decode import disk_rate
from nearflash.bench.weights.forward import DENSE, LargeModel
from nearflash.weights import open_checkpoint
from nearflash.weights.weights_map import WeightsMap

__all__ = ["measure"]

_REPEATS = 5


def measure(folders: LargeModel, path: Path) -> Iterator[dict[str, Any]]:
    """A row for each format; `speedup_over_bytes_ratio` is 1 where the time shrinks as the bytes do."""
    rate, seconds, stored = disk_rate(path), dict[str, list[float]](), dict[str, int]()
    for _ in range(_REPEATS + 1):
        for format, folder in folders.formats.items():
            stored[format], dense, taken = _pass(folder, folders.names)
            seconds.setdefault(format, []).append(taken)
    medians = {format: statistics.median(each[1:]) for format, each in seconds.items()}
    for format, each in seconds.items():
        speedup = medians[DENSE] / medians[format]
        yield {
            "format": format,
            "dtype": "bf16",
            "bytes_fraction": stored[format] / dense,
            "of": "dense 16-bit bytes",
            "seconds": medians[format],
            "seconds_range": [min(each[1:]), max(each[1:])],
            "output_gbps": dense / medians[format] / 1e9,
            "read_gbps": stored[format] / medians[format] / 1e9,
            "disk_read_gbps": rate,
            "speedup_over_dense": speedup,
            "bytes_ratio": stored[DENSE] / stored[format],
            "speedup_over_bytes_ratio": speedup * stored[format] / stored[DENSE],
        }


def _pass(folder: Path, names: list[str]) -> tuple[int, int, float]:
    """Stored bytes, dense bytes, and seconds."""
    every = open_checkpoint(folder)
    tensors = {name: every[name] for name in names}
    with WeightsMap(tensors) as weights:
        start = time.perf_counter()
        for name in names:
            weights[name]
        taken = time.perf_counter() - start
    stored = sum(tensor.stored_bytes for tensor in tensors.values())
    return stored, sum(tensor.dense_bytes for tensor in tensors.values()), taken
