"""Direct I/O through each of the kernel's queues: GB/s, and milliseconds of processor time for a GB (10^9 bytes).

Whole passes over a file, in order, with so many requests in flight; the queues in turns, so that what else the machine
does for a second is no queue's alone. The kernel's own threads and the host of a virtual drive are not counted.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from nearflash.bench.options import Option
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.io.queue import QueueBackend, usable_queues

__all__ = ["run"]

_MEMORY_BYTES = 16 << 20
_CALLS, _SIZES = ("read", "write"), (128 << 10, 1 << 20)


def run(
    folder: Annotated[Path, Option("The folder on the drive to measure.", Path, metavar="DIR")] = Path(),
    sizes: Annotated[Sequence[int], Option("Bytes of a request.", int, many=True, metavar="BYTES")] = _SIZES,
    depths: Annotated[Sequence[int], Option("Requests in flight.", int, many=True, metavar="N")] = (4, 16),
    repeats: Annotated[int, Option("Passes of each.", int, metavar="N")] = 9,
    file_bytes: Annotated[int, Option("Bytes of the file.", int, metavar="BYTES")] = 256 << 20,
) -> Iterator[dict[str, Any]]:
    """A row for each call, size, depth and queue; io_uring with registered memory, too."""
    variants = [(queue, False) for queue, missing in usable_queues().items() if not missing]
    variants += [("io_uring", True)] if ("io_uring", False) in variants else []
    with tempfile.TemporaryDirectory(prefix=".nearflash-probe-", dir=folder) as inside:
        memory = aligned_buffer(_MEMORY_BYTES)
        memory[:] = np.frombuffer(np.random.default_rng(0).bytes(_MEMORY_BYTES), np.uint8)
        with DirectFile.create(Path(inside) / "blocks", file_bytes) as file:
            for size_bytes, depth in product(sizes, depths):
                yield from _measure(file, memory, size_bytes, depth, repeats, variants)


def _measure(
    file: DirectFile, memory: Any, size_bytes: int, depth: int, repeats: int, variants: Sequence[tuple[str, bool]]
) -> Iterator[dict[str, Any]]:
    backends = [QueueBackend(depth, queue) for queue, _ in variants]
    for backend, (_, registered) in zip(backends, variants, strict=True):
        if registered:
            backend.register(memory)
    seen: dict[tuple[str, int], list[tuple[float, float]]] = {}
    _pass(file, memory, size_bytes, "write")  # what was never written is not read as it will be
    for _, call, number in product(range(repeats), _CALLS, range(len(backends))):
        file.backend = backends[number]
        seen.setdefault((call, number), []).append(_pass(file, memory, size_bytes, call))
    for (call, number), passes in seen.items():
        rates, processor = zip(*passes, strict=True)
        queue, registered = variants[number]
        yield {
            "call": call, "kib": size_bytes >> 10, "depth": depth, "queue": queue, "registered": registered,
            "gb_per_second": statistics.median(rates), "least_gb_per_second": min(rates),
            "most_gb_per_second": max(rates), "cpu_ms_per_gb": statistics.median(processor),
            "least_cpu_ms_per_gb": min(processor), "most_cpu_ms_per_gb": max(processor),
        }  # fmt: skip


def _pass(file: DirectFile, memory: Any, size_bytes: int, call: str) -> tuple[float, float]:
    """GB/s, and ms of processor time for a GB, of one pass; writes are not flushed, as all of them are direct."""
    rows, total = memory.reshape(-1, size_bytes), file.size_bytes
    places = np.arange(len(rows), dtype=np.int64) * size_bytes
    move = file.read_many if call == "read" else file.write_many
    start, processor = time.perf_counter(), time.process_time()
    for offset in range(0, total, memory.nbytes):
        count = min(len(rows), (total - offset) // size_bytes)
        move(offset + places[:count], rows[:count])
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    return total / seconds / 1e9, 1e3 * processor / (total / 1e9)
