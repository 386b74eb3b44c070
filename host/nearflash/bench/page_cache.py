"""Files taken from the page cache, so that reads come from the disk. Source: posix_fadvise(2), POSIX_FADV_DONTNEED."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["drop", "write_back"]


def write_back(files: Iterable[Path]) -> None:
    """Only what is on disk can be dropped."""
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
