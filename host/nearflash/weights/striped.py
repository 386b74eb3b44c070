"""A checkpoint's files over several drives: a copy in chunks, so that what a layer needs comes from all at once.

    path 0:  label │ chunk 0 │ chunk 2 │ chunk 3 │ …      ratio 2,1: of every three chunks two
    path 1:  label │ chunk 1 │ chunk 4 │ …

Chunks are of all files one after the other, each filled up with zeros to whole chunks. So the chunks of any range of a
file follow one another on each drive, and a range is one request to each.
"""

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.io.sealed import seal, unseal
from nearflash.storage.io.unchanged import UnchangedFile
from nearflash.storage.state.safetensors import new_file
from nearflash.storage.state.stripe import Stripe
from nearflash.support.threads import map_all

__all__ = ["CHUNK_BYTES", "StripedFile", "Stripes"]

CHUNK_BYTES = 1 << 20
_LABEL_BYTES = 64 << 10
_KIND, _VERSION = "stripe", 2
_IN_FLIGHT = 2
"""Requests to each drive."""


class Stripes:
    """Files of a checkpoint, read from `paths` at once. Close it.

    files: of the checkpoint, in any order. ratio: chunks on each path, whole numbers; None: as many on each. Where no
    path is there the copy is made, after `announce` was told so; where all are there they must be of these very files
    (name, size, times, inode), and of this ratio. Raises StateError otherwise, StorageFullError where a drive has no
    room: nothing is left of a copy then that was not finished. chunk_bytes: a multiple of 4,096.
    """

    def __init__(
        self, files: Sequence[UnchangedFile], paths: Sequence[Path], ratio: Sequence[int] | None = None, *,
        chunk_bytes: int = CHUNK_BYTES, announce: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        if not paths or len(set(paths)) < len(paths):
            raise CommandError(f"weights_path must be given once for each drive, not {', '.join(map(str, paths))}")
        self.paths, self.chunk_bytes = tuple(paths), chunk_bytes
        self._files = sorted({file.path: file for file in files}.values(), key=lambda file: str(file.path))
        self._stripe = Stripe.among(len(paths), ratio, "weights_ratio")
        self._ends = np.cumsum([-(-file.size_bytes // chunk_bytes) for file in self._files]).tolist()
        there = [path for path in paths if os.path.lexists(path)]
        if not there:
            size = self._ends[-1] * chunk_bytes
            announce(f"weights: {size / 1e9:,.2f} GB are copied once to {', '.join(map(str, paths))}")
            self._make()
        elif len(there) < len(paths):
            missing = next(path for path in paths if path not in there)
            raise StateError(f"{missing} must be there as {there[0]} is: remove the others, and all are made again")
        self._parts = [UnchangedFile(path) for path in paths]
        salts = {self._check(number, part) for number, part in enumerate(self._parts)}
        if len(salts) > 1:
            raise StateError(f"{', '.join(map(str, paths))} must be of one copy: remove them, and all are made again")
        self.read_bytes = [0] * len(paths)
        """Bytes read so far from each path."""
        self._striped: dict[int, StripedFile] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_IN_FLIGHT * len(paths), "stripes")

    def file(self, file: UnchangedFile) -> "StripedFile":
        """A file of the checkpoint, read from all paths: one object for each."""
        place = next(place for place, own in enumerate(self._files) if own.path == file.path)
        if place not in self._striped:
            self._striped[place] = StripedFile(file, self, self._ends[place - 1] if place else 0)
        return self._striped[place]

    def read(self, offset: int, memories: Sequence[memoryview], direct: bool) -> None:
        """Fill memories from the chunks, one after the other from byte `offset` on. Raises OSError with the path."""
        spans: dict[int, tuple[int, list[memoryview]]] = {}
        for part, place, memory in self._pieces(offset, memories):
            spans.setdefault(part, (place, []))[1].append(memory)

        def read(part: int) -> None:
            place, into = spans[part]
            size = sum(map(len, into))
            try:
                done = self._parts[part].scatter(into, place, direct)
                if done < size:
                    raise OSError(errno.ENODATA, f"the file ends {size - done} bytes too early")
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}, on {self.paths[part]}", str(self.paths[part])) from error
            with self._lock:
                self.read_bytes[part] += size

        map_all(self._pool, read, spans)

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._pool.shutdown()

    def _pieces(self, offset: int, memories: Sequence[memoryview]) -> Iterator[tuple[int, int, memoryview]]:
        """Cut memories at the ends of chunks: path, place in its file, memory."""
        for memory in memories:
            at = 0
            while at < len(memory):
                chunk, inside = divmod(offset, self.chunk_bytes)
                size = min(self.chunk_bytes - inside, len(memory) - at)
                part, place = self._place(chunk)
                yield part, place + inside, memory[at : at + size]
                at, offset = at + size, offset + size

    def _place(self, chunk: int) -> tuple[int, int]:
        """The path of a chunk, and where it lies there."""
        rounds, turn = divmod(chunk, sum(self._stripe.ratio))
        part = self._stripe.file_at(chunk)
        before = rounds * self._stripe.ratio[part] + sum(self._stripe.file_at(each) == part for each in range(turn))
        return part, _LABEL_BYTES + before * self.chunk_bytes

    def _label(self, number: int) -> dict[str, Any]:
        return {"version": _VERSION, "ratio": list(self._stripe.ratio), "part": number, "chunk": self.chunk_bytes,
                "files": [_identify(file) for file in self._files]}  # fmt: skip

    def _check(self, number: int, part: UnchangedFile) -> str:
        """The random digits of a part. Raises StateError where it is not of these files."""
        try:
            body = unseal(_KIND, part.read(0, _LABEL_BYTES))
        except (OSError, StateError) as error:
            raise StateError(f"{part.path} must be a part of striped weights, and is left as it is: {error}") from error
        salt = str(body.pop("salt", ""))
        if part.mtime_ns != body.pop("time_ns", 0):
            raise StateError(f"{part.path} must be as it was made, but was written to: remove all parts")
        if body != self._label(number):
            raise StateError(
                f"{part.path} must be part {number} of this checkpoint, as it is now, of ratio "
                f"{','.join(map(str, self._stripe.ratio))}: remove all parts, and they are made again, or give others"
            )
        return salt

    def _make(self) -> None:
        time_ns = _draw_time()
        drawn = {"salt": secrets.token_hex(16), "time_ns": time_ns}
        with ExitStack() as stack:
            outs: list[IO[bytes]] = [stack.enter_context(new_file(path)) for path in self.paths]
            for number, out in enumerate(outs):
                out.write(seal(_KIND, self._label(number) | drawn, _LABEL_BYTES).data)
            chunks = (chunk for file in self._files for chunk in self._chunks(file))
            for number, data in enumerate(chunks):
                outs[self._stripe.file_at(number)].write(data)
        for path in self.paths:
            os.utime(path, ns=(time.time_ns(), time_ns))

    def _chunks(self, file: UnchangedFile) -> Iterator[bytes]:
        for start in range(0, file.size_bytes, self.chunk_bytes):
            try:
                data = file.read(start, min(self.chunk_bytes, file.size_bytes - start)).tobytes()
            except OSError as error:
                raise StateError(f"{file.path} cannot be read ({error.strerror}): check the drive") from error
            yield data.ljust(self.chunk_bytes, b"\0")


def _identify(file: UnchangedFile) -> list[Any]:
    """The identity of a file: other contents of the same name, size and time have another inode or change time, which
    no copying program sets.
    """
    status = os.fstat(file.descriptor(direct=False))
    return [file.path.name, file.size_bytes, file.mtime_ns, status.st_ino, status.st_ctime_ns]


def _draw_time() -> int:
    """A past time that parts have, and no part that was written to since: of whole even seconds, as FAT keeps them."""
    return (946_684_800 + 2 * secrets.randbelow(300_000_000)) * 10**9


class StripedFile(UnchangedFile):
    """A file of a checkpoint whose bytes come from several drives; its name, and `read`, are those of the original."""

    def __init__(self, file: UnchangedFile, stripes: Stripes, first_chunk: int) -> None:
        self.path, self.size_bytes, self.mtime_ns = file.path, file.size_bytes, file.mtime_ns
        self._first, self._stripes = first_chunk * stripes.chunk_bytes, stripes
        self.descriptor, self.read = file.descriptor, file.read  # type: ignore[method-assign]

    def check(self) -> None:
        """Nothing: `scatter` compares the drives' files with what they were."""

    def scatter(self, memories: Sequence[memoryview], offset: int, direct: bool) -> int:
        """See UnchangedFile.scatter."""
        self._stripes.read(self._first + offset, memories, direct)
        return min(sum(map(len, memories)), self.size_bytes - offset)
