"""The kernel's interrupt as a file of Linux' userspace I/O.

Writing 1 to the file unmasks the interrupt, and reading gives the number of them so far, which comes when the line is
high. Source: Linux, Documentation/driver-api/uio-howto.rst.
"""

import os
import select
from pathlib import Path

__all__ = ["UioInterrupt"]

_COUNT_BYTES = 4


class UioInterrupt:
    """An open /dev/uio file. Raises OSError where it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def wait(self, timeout_s: float) -> bool:
        """Unmask the interrupt and sleep until it comes, or the time is over. A line that is high comes at once."""
        os.write(self._file, (1).to_bytes(_COUNT_BYTES, "little"))
        ready, _, _ = select.select([self._file], [], [], timeout_s)
        if ready:
            os.read(self._file, _COUNT_BYTES)
        return bool(ready)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
