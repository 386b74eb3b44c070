"""The bandwidth of a drive by direct I/O: writes, reads, and both at once, in blocks that several threads ask for.

The file is written before it is read, so that no read is of an extent that the file system knows to be empty.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from nearflash.storage.io.backend import IoBackend
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.support.closing import Closing

__all__ = ["CACHED_BYTES", "Probe"]

BLOCK_BYTES = 16 << 20
"""One request: the kernel cuts it to what the drive takes (1 to 4 MiB) and keeps those in flight. Four such buffers do
not stay in a processor's cache, no more than what an optimizer reads and writes does."""
CACHED_BYTES = 2 << 20
"""A request of which four do stay there: a virtual drive, moved by a processor too, was a fifth to a half faster."""
THREADS = 2
"""Requests of a direction in flight; more were not faster (a virtual drive, two cores)."""


class Probe(Closing):
    """A file of `size_bytes` (rounded up to blocks) in `folder`, which is removed at the end.

    Its methods return seconds, including the flush after the last write. Past the end of the file they continue at its
    beginning.
    Raises StateError, StorageFullError.
    """

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        *,
        block_bytes: int = BLOCK_BYTES,
        threads: int = THREADS,
        direct: bool = True,
        backend: IoBackend | None = None,
    ) -> None:
        self._block_bytes, self._threads = block_bytes, threads
        self._blocks = max(2, -(-size_bytes // block_bytes))
        self._folder = tempfile.TemporaryDirectory(prefix=".nearflash-probe-", dir=folder)
        try:
            path = Path(self._folder.name) / "blocks"
            self._file = DirectFile.create(path, self._blocks * block_bytes, direct=direct, backend=backend)
        except BaseException:
            self._folder.cleanup()
            raise
        noise = np.random.default_rng(0).bytes(block_bytes)  # drives may compress
        self._memory = {call: [aligned_buffer(block_bytes) for _ in range(threads)] for call in ("read", "write")}
        for memory in chain(*self._memory.values()):
            memory[:] = np.frombuffer(noise, np.uint8)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self._blocks * self._block_bytes

    def write(self, size_bytes: int) -> float:
        """Write so many bytes, rounded up to blocks."""
        return self.both(0, size_bytes)

    def read(self, size_bytes: int) -> float:
        """Read so many bytes, rounded up to blocks."""
        return self.both(size_bytes, 0)

    def both(self, read_bytes: int, written_bytes: int) -> float:
        """Reads of the file's first half and writes to its second at the same time; alone each has the whole."""
        half = self._blocks // 2 if read_bytes and written_bytes else self._blocks
        start = time.perf_counter()
        with ThreadPoolExecutor(2 * self._threads) as pool:
            reads = self._share("read", read_bytes, 0, half)
            writes = self._share("write", written_bytes, self._blocks - half, half)
            jobs = [pool.submit(job) for job in chain(*zip_longest(reads, writes)) if job]
            for job in jobs:
                job.result()
        if written_bytes:
            self._file.flush()
        return time.perf_counter() - start

    def close(self) -> None:
        """Remove the file; may be called twice."""
        self._file.close()
        self._folder.cleanup()

    def _share(self, call: str, size_bytes: int, first: int, blocks: int) -> list[Callable[[], None]]:
        """One job for each thread: every so many-th block."""
        count, move = -(-size_bytes // self._block_bytes), getattr(self._file, call)

        def job(thread: int) -> Callable[[], None]:
            def run() -> None:
                for index in range(thread, count, self._threads):
                    move((first + index % blocks) * self._block_bytes, self._memory[call][thread])

            return run

        return [job(thread) for thread in range(self._threads)] if count else []
