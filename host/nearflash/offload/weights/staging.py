"""Stored bytes of compressed tensors, read ahead of the memory that they are expanded into.

The buffer of the next layer but one is still computed with when the next layer's last tensors are expanded; the drive
need not wait for either: it goes on into a few memories, each of one tensor's stored bytes.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from nearflash.planning.policy import STAGED_TENSORS
from nearflash.storage.io.direct import aligned_buffer
from nearflash.support.buffers import BufferPool
from nearflash.support.threads import set_ieee_arithmetic
from nearflash.weights.sources import SourcePiece

__all__ = ["StagedPiece", "StagedReader", "StagedReads"]


class _Stage:
    """Memory that grows to the largest tensor and stays: reads into memory that was never touched are half as fast."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """So many bytes of it, aligned."""
        if self._memory.size < size_bytes:
            self._memory = aligned_buffer(size_bytes)
        return self._memory[:size_bytes]


class StagedPiece:
    """A piece of the parameter `name`, its stored bytes in a stage. Release it once."""

    def __init__(self, name: str, piece: SourcePiece, stage: _Stage, stages: BufferPool[_Stage]) -> None:
        self.name, self.piece = name, piece
        self._stage, self._stages = stage, stages

    def release(self) -> None:
        """Its stage is free for another tensor."""
        self._stages.release(self._stage)


class StagedReads:
    """Reads of a layer's pieces that were begun. Iterating gives each as it is read, to whoever releases it: no read
    waits for one before it, which may wait for a stage that a later one has. It raises what reading raised.
    """

    def __init__(self, reads: Iterable[Future[StagedPiece]] = ()) -> None:
        self._reads = set(reads)

    def __iter__(self) -> Iterator[StagedPiece]:
        for read in as_completed(self._reads):
            self._reads.remove(read)
            yield read.result()

    def drop(self) -> None:
        """Cancel or release what nobody took."""
        for read in as_completed([read for read in self._reads if not read.cancel()]):
            if read.exception() is None:
                read.result().release()
        self._reads.clear()


class StagedReader:
    """Reads pieces about in the order in which they are begun, `threads` at once. Close it when that has ended."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "nearflash-stage", initializer=set_ieee_arithmetic)
        self._stages = BufferPool("stages of weights", (_Stage() for _ in range(STAGED_TENSORS)))

    @contextmanager
    def begin(self, pieces: Iterable[tuple[str, SourcePiece]]) -> Iterator[StagedReads]:
        """Read pieces, each with its parameter's name; what is not taken in the block is dropped at its end."""
        reads = StagedReads([self._threads.submit(self._read, name, piece) for name, piece in pieces])
        try:
            yield reads
        finally:
            reads.drop()

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._threads.shutdown()

    def _read(self, name: str, piece: SourcePiece) -> StagedPiece:
        with self._stages.fill() as stage:
            return StagedPiece(name, piece.keep(stage.take), stage, self._stages)
