"""Blocks of KV by content key in files of a fixed length: what a serving engine offloads, over restarts.

What `put` reports is durable. What `get` serves is what was put under that very key, in that namespace, checked; all
else is a miss: a block that is damaged, torn, another's, evicted, or that its drive cannot read.
"""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError, StateError, StorageFullError
from nearflash.storage.blocks.block_file import BlockFile, Get
from nearflash.storage.blocks.record import KEY_BYTES
from nearflash.storage.blocks.segment_log import Put
from nearflash.storage.blocks.statistics import BlockStatistics
from nearflash.storage.blocks.transfer import BlockTransfer
from nearflash.storage.blocks.writer import BlockWriter
from nearflash.storage.io.backend import IoBackend, PositionalBackend
from nearflash.storage.io.profile import queue_backend
from nearflash.support.closing import Closing

__all__ = ["BlockStore"]

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
IN_FLIGHT_BYTES = 1 << 30


class BlockStore(Closing):
    """Use it as a context manager, or `close` it. Any thread may call; no `submit_…` waits for a drive.

    path: a file, or several on drives of their own; each is made where it is not there.
    capacity_bytes: length of all files together, which have it from the start; `weights` (default: even) are the files'
    shares of it, and of what is put. A file that is there keeps its length.
    block_bytes: most that a block has. namespace: whatever makes KV incompatible (model, dtype, rank, layout), as text:
    a part of every block's identity. in_flight_bytes: most that puts may have given and not seen stored yet.

    Raises StorageFullError where a disk has no room, StateError for a file of something else, of other blocks or of
    another namespace, or one that is open already: there is one user of a file at a time.
    """

    def __init__(
        self, path: Paths, capacity_bytes: int, block_bytes: int, namespace: str, *,
        weights: Sequence[float] | None = None, in_flight_bytes: int = IN_FLIGHT_BYTES, direct: bool = True,
        backend: IoBackend | None = None,
    ) -> None:  # fmt: skip
        paths = [Path(path)] if isinstance(path, str | PathLike) else [Path(one) for one in path]
        self._shares = _shares(len(paths), weights)
        self.block_bytes, self._files = block_bytes, list[BlockFile]()
        try:
            for one, share in zip(paths, self._shares, strict=True):
                self._files.append(
                    BlockFile.open(one, int(capacity_bytes * share), block_bytes, namespace, direct=direct,
                                   backend=backend or _choose_backend(one.parent))
                )  # fmt: skip
        except BaseException:
            for file in self._files:
                file.close()
            raise
        self._writers = [
            BlockWriter(file, int(in_flight_bytes * share))
            for file, share in zip(self._files, self._shares, strict=True)
        ]
        self._given = [0] * len(paths)
        """Blocks given to each file."""

    # Blocks

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """Look up whether the block of each key is there, durable; no drive is asked. It does not count as use."""
        return [any(key in file.index for file in self._files) for key in keys]

    def put(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[bool]:
        """Store blocks durably; of each whether it is. A key that is there already is left as it is.

        keys: 1 to 48 bytes. buffers: contiguous bytes, 1 to block_bytes of them. Raises CommandError for others;
        StorageFullError where they have no room beside pinned blocks: nothing is stored then.
        """
        return self.submit_put(keys, buffers).result()

    def get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[bool]:
        """Fill a buffer from each block; of each whether it is filled. What is not, is as it was before.

        buffers: writable, contiguous, of as many bytes as were put. Raises CommandError.
        """
        return self.submit_get(keys, buffers).result()

    def submit_put(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> BlockTransfer:
        """See `put`; the buffers must stay as they are until the transfer has ended or is stopped.

        Where more than in_flight_bytes would be in flight, the blocks are refused at once.
        """
        transfer, arrays = BlockTransfer(len(keys)), self._check(keys, buffers)
        missing = [number for number, present in enumerate(self.contains(keys)) if not present]
        usable = [index for index, file in enumerate(self._files) if not file.failed]
        room = sum(max(self._files[index].room_blocks, 0) for index in usable)
        if usable and len(missing) > room:
            raise StorageFullError(f"there must be room for {len(missing)} blocks beside pinned ones, not for {room}")
        for number in set(range(len(keys))).difference(missing if usable else ()):
            transfer.settle(number, number not in missing)
        self._distribute([(transfer, number, keys[number], arrays[number]) for number in missing], usable)
        return transfer

    def submit_get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> BlockTransfer:
        """See `get`; the buffers are the transfer's until it has ended or is stopped."""
        transfer, arrays = BlockTransfer(len(keys)), self._check(keys, buffers)
        if any(not array.flags.writeable for array in arrays):
            raise CommandError("buffers must be writable: blocks are read into them")
        blocks: list[list[Get]] = [[] for _ in self._files]
        for number, key in enumerate(keys):
            home = next((index for index, file in enumerate(self._files) if key in file.index), 0)
            blocks[home].append((number, key, arrays[number]))
        for file, part in zip(self._files, blocks, strict=True):
            file.submit_read(transfer, part)
        return transfer

    def mark_used(self, keys: Iterable[bytes]) -> None:
        """Blocks count as used now."""
        for key, file in self._homes(keys):
            with file.lock:
                file.index.find(key)

    def pin(self, keys: Iterable[bytes]) -> list[bool]:
        """Never evict these blocks until `unpin` was called as often; of each whether it is there."""
        keys, pinned = list(keys), set()
        for key, file in self._homes(keys):
            with file.lock:
                if key in file.index:
                    file.index.pins[key] = file.index.pins.get(key, 0) + 1
                    pinned.add(key)
        return [key in pinned for key in keys]

    def unpin(self, keys: Iterable[bytes]) -> None:
        """See `pin`; a block that is not pinned is left as it is. Pins do not outlast the process."""
        for key, file in self._homes(keys):
            with file.lock:
                left = file.index.pins.get(key, 0) - 1
                file.index.pins.pop(key, None)
                if left > 0:
                    file.index.pins[key] = left

    def stats(self) -> BlockStatistics:
        """Counts of all files."""
        return reduce(add, (file.statistics for file in self._files))

    def close(self) -> None:
        """Store what is in flight, and close the files; it may be called twice."""
        for writer in self._writers:
            writer.close()
        for file in self._files:
            file.close()

    # Parts

    def _homes(self, keys: Iterable[bytes]) -> Iterable[tuple[bytes, BlockFile]]:
        return ((key, file) for key in keys for file in self._files if key in file.index)

    def _check(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[NDArray[np.uint8]]:
        """The buffers as bytes. Raises CommandError."""
        if len(keys) != len(buffers):
            raise CommandError(f"there must be a buffer for each key, not {len(buffers)} for {len(keys)}")
        for key in keys:
            if type(key) is not bytes or not 0 < len(key) <= KEY_BYTES:
                raise CommandError(f"a key must be 1 to {KEY_BYTES} bytes, not {key!r:.80}")
        arrays = [_as_bytes(buffer) for buffer in buffers]
        for array in arrays:
            if not 0 < len(array) <= self.block_bytes:
                raise CommandError(f"a block must have 1 to {self.block_bytes} bytes, not {len(array)}")
        return arrays

    def _distribute(self, blocks: Sequence[Put], usable: Sequence[int]) -> None:
        """Hand blocks to the files' writers, by weight."""
        parts: list[list[Put]] = [[] for _ in self._files]
        for block in blocks if usable else ():
            file = min(usable, key=lambda index: self._given[index] / self._shares[index])
            self._given[file] += 1
            parts[file].append(block)
        for writer, part in zip(self._writers, parts, strict=True):
            if part:
                writer.submit(part)


def _as_bytes(buffer: Any) -> NDArray[np.uint8]:
    """Raises CommandError."""
    try:
        return np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
    except (TypeError, ValueError) as error:
        raise CommandError(f"a buffer must be contiguous bytes, not {type(buffer).__name__}: {error}") from error


def _shares(files: int, weights: Sequence[float] | None) -> list[float]:
    """Parts of one. Raises CommandError."""
    weights = [1.0] * files if weights is None else list(weights)
    if not files or len(weights) != files or not all(0 < weight < math.inf for weight in weights):
        raise CommandError(f"weights must be a number above 0 for each of {files} files, not {weights!r}")
    return [weight / sum(weights) for weight in weights]


def _choose_backend(folder: Path) -> IoBackend:
    try:
        return queue_backend(folder)
    except StateError:  # a kernel, or a container, without
        return PositionalBackend()
