"""A file that is read for a whole run, and must stay what it was.

One descriptor for all reads: where the name goes to another file meanwhile, the one that was opened is read to the end.
One that is written to or cut gives an error with the first read after that, instead of a mixture of two contents; it is
read, never mapped, so that a cut one cannot end the process (SIGBUS).
"""

import errno
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.io.backend import PositionalBackend
from nearflash.support.files import open_regular

__all__ = ["UnchangedFile"]

_TICK_NS = 10_000_000
"""Coarsest step of the clock that files' times are of (a kernel with 100 ticks a second)."""


class UnchangedFile:
    """A regular file, open as long as this object lives; any thread may read. Everything raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors = {False: open_regular(path)}
        weakref.finalize(self, _close, self._descriptors)
        self._lock = threading.Lock()
        status = os.fstat(self._descriptors[False])
        age_ns = time.time_ns() - status.st_mtime_ns
        if 0 <= age_ns < _TICK_NS:  # a write right after this one would leave the same time
            time.sleep((_TICK_NS - age_ns) / 1e9)
            status = os.fstat(self._descriptors[False])
        self.size_bytes = status.st_size
        """When it was opened."""
        self.mtime_ns = status.st_mtime_ns

    def descriptor(self, direct: bool) -> int:
        """For positional reads, past the page cache if `direct` and the file system can; call `check` after each."""
        with self._lock:
            if direct not in self._descriptors:
                self._descriptors[direct] = self._open_direct()
            return self._descriptors[direct]

    def check(self) -> None:
        """Raise OSError where the file is not the one that was opened any more: what was read may be of another one."""
        status = os.fstat(self._descriptors[False])
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise OSError(errno.ESTALE, "it was changed while it was in use; start again", str(self.path))

    def scatter(self, memories: Sequence[memoryview], offset: int, direct: bool) -> int:
        """Fill one memory after another from `offset` on; fewer bytes than asked for only at the end of the file.

        direct: past the page cache if the file system can; then all is a multiple of 4,096 bytes. Raises OSError, also
        as `check` does.
        """
        backend, descriptor = PositionalBackend(), self.descriptor(direct)
        if len(memories) == 1:  # at the end of the file nothing is read twice then
            done = backend.read(descriptor, memories[0], offset)
        else:
            done = backend.scatter(descriptor, memories, offset)
        self.check()
        return done

    def read(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Bytes through the page cache. Raises OSError also where the file ends before them."""
        data, done = np.empty(size_bytes, np.uint8), 0
        while done < size_bytes:
            count = os.preadv(self._descriptors[False], [data.data[done:]], offset + done)
            if not count:
                break
            done += count
        self.check()
        if done < size_bytes:
            raise OSError(errno.ENODATA, f"the file ends {size_bytes - done} bytes too early", str(self.path))
        return data

    def _open_direct(self) -> int:
        # By its descriptor, not by its name, which may be another file's by now.
        source = self._descriptors[False]
        try:
            return os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without O_DIRECT
            return source


def _close(descriptors: dict[bool, int]) -> None:
    for descriptor in set(descriptors.values()):
        os.close(descriptor)
