"""How fast a drive reads and writes by direct I/O, by the bytes of a request and the requests in flight."""

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nearflash.abi.errors import StateError
from nearflash.storage.direct import DirectFile, Engine, aligned_buffer

__all__ = ["BLOCK_BYTES", "DEPTHS", "Rate", "measure_drive", "report"]

BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTHS = (1, 2, 4, 8)
FILE_BYTES = 256 << 20
REPEATS = 5


@dataclass(frozen=True)
class Rate:
    """GB/s (10^9 bytes) of one kind of request: median of the repeats, slowest and fastest."""

    call: str
    """read, or write (the flush at the end included)."""
    block_bytes: int
    depth: int
    """Threads, so requests in flight."""
    median: float
    low: float
    high: float


def measure_drive(
    folder: Path,
    *,
    blocks: Sequence[int] = BLOCK_BYTES,
    depths: Sequence[int] = DEPTHS,
    file_bytes: int = FILE_BYTES,
    repeats: int = REPEATS,
    direct: bool = True,
    engine: Engine | None = None,
) -> Iterator[Rate]:
    """Write and read a file of `file_bytes` in a folder, in random order of its blocks; the file is removed.

    Writes of all kinds come first, so that no read is of an extent that the file system knows to be empty. Raises
    StateError, StorageFullError.
    """
    if not folder.is_dir():
        raise StateError(f"{folder} must be a folder on the drive to measure; make it first")
    with tempfile.TemporaryDirectory(prefix=".nearflash-measure-", dir=folder) as name:
        path = Path(name) / "blocks"
        with DirectFile.create(path, file_bytes, direct=direct, engine=engine) as file:
            for call in ("write", "read"):
                for block_bytes in blocks:
                    for depth in depths:
                        rates = [_once(file, call, block_bytes, depth, file_bytes, seed) for seed in range(repeats)]
                        yield Rate(call, block_bytes, depth, statistics.median(rates), min(rates), max(rates))


def report(rates: Iterable[Rate]) -> Iterator[str]:
    """A line for each rate, with its share of the fastest of its call; then the fastest of each."""
    measured = list(rates)
    best = {call: max((r for r in measured if r.call == call), key=lambda r: r.median) for call in ("write", "read")}
    for rate in measured:
        share = rate.median / best[rate.call].median
        yield (
            f"{rate.call:<6}{rate.block_bytes >> 10:>6} KiB x {rate.depth:<2} {rate.median:6.2f} GB/s  "
            f"({rate.low:.2f} to {rate.high:.2f}) {share:5.0%} of the fastest {rate.call}"
        )
    for call, rate in best.items():
        yield f"fastest {call}: {rate.block_bytes >> 10} KiB, {rate.depth} in flight, {rate.median:.2f} GB/s"


def _once(file: DirectFile, call: str, block_bytes: int, depth: int, file_bytes: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    offsets = rng.permutation(file_bytes // block_bytes) * block_bytes
    buffers = [aligned_buffer(block_bytes) for _ in range(depth)]
    for memory in buffers:
        memory[:] = np.frombuffer(rng.bytes(block_bytes), np.uint8)  # drives may compress
    move = file.read if call == "read" else file.write

    def run(thread: int) -> None:
        for offset in offsets[thread::depth].tolist():
            move(offset, buffers[thread])

    start = time.perf_counter()
    with ThreadPoolExecutor(depth) as threads:
        list(threads.map(run, range(depth)))
    if call == "write":
        file.flush()
    return len(offsets) * block_bytes / (time.perf_counter() - start) / 1e9
