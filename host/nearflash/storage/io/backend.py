"""Who moves bytes between an open file and memory: one blocking call after another, or a back end with queues.

Source: preadv(2), pwritev(2), fdatasync(2).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_BYTES", "IoBackend", "PositionalBackend"]

BLOCK_BYTES = 4096
"""Of which offsets, lengths and addresses of direct I/O are multiples."""
_VECTORS = 1024
"""Memories that one preadv or pwritev takes (IOV_MAX)."""
_MoveVectors = Callable[[int, Sequence[memoryview], int], int]


def _move_all(move: Callable[[int, memoryview, int], int], fd: int, memories: Sequence[memoryview], offset: int) -> int:
    """Move one memory after another, until one is not moved whole; bytes that were moved."""
    done = 0
    for memory in memories:
        moved = move(fd, memory, offset + done)
        done += moved
        if moved < len(memory):
            break
    return done


class IoBackend(ABC):
    """Moves bytes between an open file and memory. May raise OSError; returns how many bytes were moved."""

    queued: ClassVar[bool] = False
    """`read_many` keeps many reads in flight; else it takes a thread for each."""

    @abstractmethod
    def read(self, fd: int, memory: memoryview, offset: int) -> int:
        """Fill `memory` from `offset`; fewer bytes than asked for only at the end of the file."""

    def scatter(self, fd: int, memories: Sequence[memoryview], offset: int) -> int:
        """Fill one memory after another from `offset` on; fewer bytes than asked for only at the end of the file."""
        return _move_all(self.read, fd, memories, offset)

    def gather(self, fd: int, memories: Sequence[memoryview], offset: int) -> int:
        """Write one memory after another from `offset` on; fewer bytes only where the file takes no more."""
        return _move_all(self.write, fd, memories, offset)

    def read_many(self, fd: int, memory: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
        """Fill each row of `memory` (p, bytes) from its offset (p,), in any order."""
        return sum(self.read(fd, row.data, offset) for row, offset in zip(memory, offsets.tolist(), strict=True))

    def write_many(self, fd: int, memory: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
        """Write each row of `memory` (p, bytes) at its offset (p,), in any order."""
        return sum(self.write(fd, row.data, offset) for row, offset in zip(memory, offsets.tolist(), strict=True))

    def register(self, memory: NDArray[np.uint8]) -> None:  # noqa: B027
        """Keep memory, of at most 1 GiB, ready for `read_many` and `write_many`, as long as this object lives.

        It saves processor time where the kernel's queue knows registered memory; elsewhere nothing is done.
        """

    @abstractmethod
    def write(self, fd: int, memory: memoryview, offset: int) -> int:
        """Write all of `memory` at `offset`; fewer bytes only where the file takes no more."""

    @abstractmethod
    def flush(self, fd: int) -> None:
        """Return when everything written before is durable."""


class PositionalBackend(IoBackend):
    """One preadv or pwritev after another, continued after short transfers (Python repeats interrupted calls)."""

    def read(self, fd: int, memory: memoryview, offset: int) -> int:
        """See IoBackend.read."""
        return self._all(lambda done: os.preadv(fd, [memory[done:]], offset + done), len(memory))

    def scatter(self, fd: int, memories: Sequence[memoryview], offset: int) -> int:
        """See IoBackend.scatter."""
        return self._in_parts(os.preadv, super().scatter, fd, memories, offset)

    def gather(self, fd: int, memories: Sequence[memoryview], offset: int) -> int:
        """See IoBackend.gather."""
        return self._in_parts(os.pwritev, super().gather, fd, memories, offset)

    def write(self, fd: int, memory: memoryview, offset: int) -> int:
        """See IoBackend.write."""
        return self._all(lambda done: os.pwritev(fd, [memory[done:]], offset + done), len(memory))

    def flush(self, fd: int) -> None:
        """See IoBackend.flush. Times of the file alone are left out, which cost a commit of its journal."""
        os.fdatasync(fd)

    @staticmethod
    def _in_parts(
        call: _MoveVectors, one_by_one: _MoveVectors, fd: int, memories: Sequence[memoryview], at: int
    ) -> int:
        """Move as many memories as a call takes at a time; one by one those of which not all was moved."""
        total = 0
        for start in range(0, len(memories), _VECTORS):
            part = memories[start : start + _VECTORS]
            done = call(fd, part, at + total)
            total += done if done == sum(map(len, part)) else one_by_one(fd, part, at + total)
        return total

    @staticmethod
    def _all(transfer: Callable[[int], int], size_bytes: int) -> int:
        done = 0
        while done < size_bytes:
            # O_DIRECT takes whole blocks only, so a transfer cut inside a block starts over at that block.
            reached = done + transfer(done)
            if reached == size_bytes:
                return reached
            whole = reached // BLOCK_BYTES * BLOCK_BYTES
            if whole <= done:
                return reached
            done = whole
        return done
