"""The disk that a bench reads: its rate, and files taken from the page cache so that reads come from it.

Source: posix_fadvise(2), POSIX_FADV_DONTNEED.
"""

import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from nearflash.storage.io.bandwidth import Probe

__all__ = ["disk_rate", "drop", "write_back"]

_PROBE_BYTES = 512 << 20


def disk_rate(path: Path) -> float:
    """GB/s of large direct reads on the disk of a folder: median of five."""
    with Probe(path, _PROBE_BYTES) as probe:
        probe.write(probe.size_bytes)
        return probe.size_bytes / statistics.median(probe.read(probe.size_bytes) for _ in range(5)) / 1e9


def write_back(files: Iterable[Path]) -> None:
    """Write files back: only what is on disk can be dropped."""
    _each(files, os.fsync)


def drop(files: Iterable[Path]) -> None:
    """Give their pages back, as far as they were written back."""
    _each(files, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))


def _each(files: Iterable[Path], call: Callable[[int], object]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            call(fd)
        finally:
            os.close(fd)
