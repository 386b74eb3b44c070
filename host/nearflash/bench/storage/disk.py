"""Files whose contents lie in memory, and a log of what was written to them and when it was flushed."""

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.io.backend import IoBackend

__all__ = ["Flush", "LoggedDisk", "Write"]


@dataclass(frozen=True)
class Write:
    """Bytes that a file was given; they may reach the drive at any time until the file's next flush has returned."""

    file: int
    offset: int
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class Flush:
    """A flush of a file that has returned."""

    file: int


class LoggedDisk(IoBackend):
    """Contents in memory, of files that are there in name, size and lock only; numbered as they were first used.

    Writes and flushes are appended to `log` in the order in which they returned.
    """

    def __init__(self) -> None:
        self.contents: list[NDArray[np.uint8]] = []
        self.log: list[Write | Flush] = []
        self._numbers: dict[int, int] = {}

    def read(self, fd: int, memory: memoryview, offset: int) -> int:
        """See IoBackend.read."""
        part = self.contents[self._number(fd)][offset : offset + len(memory)]
        memory[: len(part)] = part.data
        return len(part)

    def write(self, fd: int, memory: memoryview, offset: int) -> int:
        """See IoBackend.write."""
        data, number = np.frombuffer(memory, np.uint8).copy(), self._number(fd)
        self.contents[number][offset : offset + len(data)] = data
        self.log.append(Write(number, offset, data))
        return len(data)

    def flush(self, fd: int) -> None:
        """See IoBackend.flush."""
        self.log.append(Flush(self._number(fd)))

    def _number(self, fd: int) -> int:
        status = os.fstat(fd)
        if status.st_ino not in self._numbers:
            self._numbers[status.st_ino] = len(self.contents)
            self.contents.append(np.zeros(status.st_size, np.uint8))
        return self._numbers[status.st_ino]
