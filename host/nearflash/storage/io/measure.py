"""How fast a drive reads and writes by direct I/O, by the bytes of a request and the requests in flight."""

import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from nearflash.abi.errors import StateError
from nearflash.storage.io.backend import IoBackend
from nearflash.storage.io.bandwidth import Probe
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.io.kernel_queue import AioQueue
from nearflash.storage.io.queue import QUEUES, QueueBackend

__all__ = [
    "BLOCK_BYTES", "DEPTHS", "PAGE_BYTES", "QUEUE_DEPTHS", "Rate", "faster_queue", "measure_drive", "measure_random",
    "report",
]  # fmt: skip

BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTHS = (1, 2, 4, 8)
FILE_BYTES = 256 << 20
REPEATS = 5
PAGE_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
QUEUE_DEPTHS = (1, 8, 32, 128)
_RANDOM_BYTES = 32 << 20
"""Read at random places in one repeat."""
_FASTER = 1.03
"""How much faster than io_submit another queue must be."""


@dataclass(frozen=True)
class Rate:
    """GB/s (10^9 bytes) of one kind of request: median of the repeats, slowest and fastest."""

    call: str
    """read, write (the flush at the end included), or random: reads at random places."""
    block_bytes: int
    depth: int
    """Requests in flight: of threads, at random places of one thread with the kernel's queue."""
    median: float
    low: float
    high: float
    queue: str = AioQueue.name
    """The kernel's queue, at random places; of threads without a meaning."""


def measure_drive(
    folder: Path,
    *,
    blocks: Sequence[int] = BLOCK_BYTES,
    depths: Sequence[int] = DEPTHS,
    file_bytes: int = FILE_BYTES,
    repeats: int = REPEATS,
    direct: bool = True,
    backend: IoBackend | None = None,
) -> Iterator[Rate]:
    """For each kind of request write and read a file of `file_bytes` in a folder; the file is removed.

    Raises StateError, StorageFullError.
    """
    if not folder.is_dir():
        raise StateError(f"{folder} must be a folder on the drive to measure; make it first")
    for block_bytes in blocks:
        for depth in depths:
            with Probe(
                folder, file_bytes, block_bytes=block_bytes, threads=depth, direct=direct, backend=backend
            ) as probe:
                probe.write(probe.size_bytes)  # what was never written is neither read nor written as it will be
                for call, move in (("write", probe.write), ("read", probe.read)):
                    rates = [probe.size_bytes / move(probe.size_bytes) / 1e9 for _ in range(repeats)]
                    yield Rate(call, block_bytes, depth, statistics.median(rates), min(rates), max(rates))


def measure_random(
    folder: Path,
    *,
    pages: Sequence[int] = PAGE_BYTES,
    depths: Sequence[int] = QUEUE_DEPTHS,
    file_bytes: int = FILE_BYTES,
    repeats: int = REPEATS,
    queues: Sequence[str] = (AioQueue.name,),
) -> Iterator[Rate]:
    """Reads of pages at random places of a file of `file_bytes`, as decode reads KV pages; the file is removed.

    Raises StateError, StorageFullError.
    """
    with tempfile.TemporaryDirectory(prefix=".nearflash-probe-", dir=folder) as inside:
        path, draw, block = Path(inside) / "pages", np.random.default_rng(0), aligned_buffer(max(pages))
        block[:] = np.frombuffer(draw.bytes(len(block)), np.uint8)
        with DirectFile.create(path, file_bytes) as file:
            for offset in range(0, file_bytes, len(block)):
                file.write(offset, block[: file_bytes - offset])
            file.flush()
        memory = aligned_buffer(max(*pages, _RANDOM_BYTES))
        memory[:] = 0  # pages of memory that were never touched are no part of a read
        with DirectFile.open(path) as file:
            for depth in depths:
                backends = [QueueBackend(depth, queue) for queue in queues]
                for backend in backends:
                    backend.register(memory)
                # In turns: what else the machine does for a second must not make one size of pages, or one queue, slow.
                measured: dict[tuple[int, str], list[float]] = {each: [] for each in product(pages, queues)}
                for _, page_bytes, file.backend in product(range(repeats), pages, backends):
                    count = max(min(_RANDOM_BYTES, file_bytes) * min(depth, 8) // 8 // page_bytes, 1)
                    into = memory[: count * page_bytes].reshape(count, page_bytes)
                    offsets = draw.integers(0, file_bytes // page_bytes, count) * page_bytes
                    start = time.perf_counter()
                    file.read_many(offsets, into)
                    rate = into.nbytes / (time.perf_counter() - start) / 1e9
                    measured[page_bytes, file.backend.queue].append(rate)
                for (page_bytes, queue), rates in measured.items():
                    yield Rate("random", page_bytes, depth, statistics.median(rates), min(rates), max(rates), queue)


def faster_queue(rates: Iterable[Rate]) -> str:
    """The kernel's queue to read at random places with: io_submit, unless another is 3 % faster, as the geometric mean
    of what was measured of both.
    """
    medians: dict[str, dict[tuple[int, int], float]] = {queue: {} for queue in QUEUES}
    for rate in rates:
        if rate.call == "random":
            medians[rate.queue][rate.block_bytes, rate.depth] = rate.median

    def faster(queue: str) -> float:
        base = medians[AioQueue.name]
        ratios = [median / base[of] for of, median in medians[queue].items() if of in base]
        return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else 0.0

    best = max(QUEUES, key=faster)
    return best if faster(best) >= _FASTER else AioQueue.name


def report(rates: Iterable[Rate]) -> Iterator[str]:
    """A line for each rate, with its share of the fastest of its call; then the fastest of each, and the queue."""
    measured = list(rates)
    calls = dict.fromkeys(rate.call for rate in measured)
    best = {call: max((r for r in measured if r.call == call), key=lambda r: r.median) for call in calls}
    for rate in measured:
        share = rate.median / best[rate.call].median
        yield (
            f"{rate.call:<6}{rate.block_bytes >> 10:>6} KiB x {rate.depth:<2} {rate.median:6.2f} GB/s  "
            f"({rate.low:.2f} to {rate.high:.2f}) {share:5.0%} of the fastest {rate.call}"
            f"{f', {rate.queue}' if rate.call == 'random' else ''}"
        )
    for call, rate in best.items():
        yield f"fastest {call}: {rate.block_bytes >> 10} KiB, {rate.depth} in flight, {rate.median:.2f} GB/s"
    if "random" in best:
        yield f"queue for reads at random places: {faster_queue(measured)}"
