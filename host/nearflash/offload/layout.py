"""Where a layer's parameters lie in one buffer, so that its file is read straight into it.

Tensors that are stored as the model computes with them keep their distances in the file, in runs that begin at a block
of it: direct I/O then puts each where it is used, without a copy; those that have a checksum are checked there. The
others are expanded or converted behind them.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nearflash.abi.errors import WeightsError
from nearflash.device.threads import set_ieee_arithmetic
from nearflash.offload.sources import Source
from nearflash.storage.io.backend import BLOCK_BYTES, PositionalBackend
from nearflash.storage.io.checksum import crc32c
from nearflash.weights.file import WeightsTensor
from nearflash.weights.weights_map import TORCH_DTYPES

__all__ = ["Layout", "LayoutReader", "ReadFile", "Run"]

GAP_BYTES = 256 << 10
"""Cheaper to read than to ask once more."""
_PART_BYTES = 16 << 20
"""Of one request."""
_ALIGNMENT = 64
_READERS = 2
"""Requests in flight; more were not faster (nearflash.storage.io.bandwidth)."""


@dataclass(frozen=True)
class Run:
    """Bytes of a file, whole blocks, and their place in the buffer."""

    path: Path
    offset: int
    size_bytes: int
    """To the end of the last tensor."""
    place: int
    what: str
    """The first tensor's name, for errors."""

    @property
    def room_bytes(self) -> int:
        """In the buffer: whole blocks."""
        return -(-self.size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def parts(self) -> Iterator["Run"]:
        """Requests of a size that keeps a drive busy."""
        for at in range(0, self.size_bytes, _PART_BYTES):
            size = min(_PART_BYTES, self.size_bytes - at)
            yield Run(self.path, self.offset + at, size, self.place + at, self.what)


class Layout:
    """The buffer of one layer. gap_bytes: between two tensors of a file that are read rather than skipped."""

    def __init__(self, sources: Mapping[str, Source], gap_bytes: int = GAP_BYTES) -> None:
        self._gap_bytes = gap_bytes
        self.runs: list[Run] = []
        self.expanded: dict[str, Source] = {}
        """What is not read in runs."""
        self._places: dict[str, tuple[int, Source]] = {}
        direct = {name: source for name, source in sources.items() if _is_direct(source)}
        self._place_runs(sorted(direct.items(), key=lambda item: _key(item[1])))
        size = sum(run.room_bytes for run in self.runs)
        for name, source in sources.items():
            if name not in direct:
                self.expanded[name] = source
                self._places[name] = (size, source)
                size += -(-source.size_bytes // _ALIGNMENT) * _ALIGNMENT
        self.size_bytes = -(-size // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def stored_bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(run.room_bytes for run in self.runs) + sum(each.stored_bytes for each in self.expanded.values())

    def check(self, memory: Tensor) -> None:
        """Compare what was read in runs with the file's checksums, where it has them. Raises WeightsError."""
        for name, (place, source) in self._places.items():
            if name in self.expanded:
                continue
            tensor = source.pieces[0].tensor
            if tensor.checksum is None:
                continue
            if crc32c(memory[place : place + tensor.stored_bytes].numpy()) != tensor.checksum:
                raise tensor.error("it is damaged: its checksum is another")

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The parameters in a buffer (size_bytes,) uint8."""
        return {
            name: memory[place : place + source.size_bytes].view(source.dtype).view(source.shape)
            for name, (place, source) in self._places.items()
        }

    def _place_runs(self, ordered: list[tuple[str, Source]]) -> None:
        place = 0
        run: Run | None = None
        for name, source in ordered:
            tensor = source.pieces[0].tensor
            end = tensor.offset + tensor.stored_bytes
            if run is None or run.path != tensor.path or tensor.offset > run.offset + run.size_bytes + self._gap_bytes:
                if run is not None:
                    self.runs.append(run)
                    place += run.room_bytes
                start = tensor.offset - tensor.offset % BLOCK_BYTES
                run = Run(tensor.path, start, end - start, place, tensor.name)
            else:
                run = Run(run.path, run.offset, max(end - run.offset, run.size_bytes), place, run.what)
            self._places[name] = (place + tensor.offset - run.offset, source)
        if run is not None:
            self.runs.append(run)


def _key(source: Source) -> tuple[str, int]:
    tensor = source.pieces[0].tensor
    return str(tensor.path), tensor.offset


def _is_direct(source: Source) -> bool:
    if source.converter is not None or len(source.pieces) != 1 or source.pieces[0].place:
        return False
    tensor = source.pieces[0].tensor
    same = tensor.form == "dense" and TORCH_DTYPES.get(tensor.dtype) is source.dtype
    return same and type(tensor) is WeightsTensor and tensor.offset % source.dtype.itemsize == 0


class ReadFile:
    """A checkpoint's file, open for reading past the page cache where the file system can; a removed one stays open."""

    def __init__(self, path: Path, direct: bool = True) -> None:
        self.path = path
        try:
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
            except OSError:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(f"{path} cannot be opened ({error.strerror}): check path and permissions") from error

    def read(self, run: Run, memory: Tensor) -> None:
        """Fill a run's place in a buffer. Raises WeightsError where the file is shorter, or reading fails."""
        view = memory[run.place : run.place + run.room_bytes].numpy().data
        try:
            done = PositionalBackend().read(self._fd, view, run.offset)
        except OSError as error:
            raise WeightsError(f"{run.path}: reading {run.what!r} failed ({error.strerror})") from error
        if done < run.size_bytes:
            raise WeightsError(
                f"{run.path}: tensor {run.what!r}, at byte {run.offset}, or one after it: the file ends "
                f"{run.size_bytes - done} bytes too early"
            )

    def close(self) -> None:
        """Close it; once."""
        os.close(self._fd)


class LayoutReader:
    """Fills buffers by their layouts, from files that stay open; any thread may ask. direct: past the page cache."""

    def __init__(self, direct: bool = True) -> None:
        self._direct = direct
        self._files: dict[Path, ReadFile] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_READERS, "nearflash-read", initializer=set_ieee_arithmetic)

    def read_runs(self, layout: Layout, memory: Tensor) -> int:
        """Read what lies in runs, and check it; the bytes of it. Raises WeightsError."""
        parts = [part for run in layout.runs for part in run.parts()]
        files = [self._file(part.path) for part in parts]
        if len(parts) == 1:
            files[0].read(parts[0], memory)
        else:
            jobs = [self._pool.submit(file.read, part, memory) for file, part in zip(files, parts, strict=True)]
            for job in jobs:
                job.result()
        layout.check(memory)
        return sum(part.size_bytes for part in parts)

    def expand(self, layout: Layout, memory: Tensor) -> int:
        """Read and expand what does not; the stored bytes of it. Raises WeightsError."""
        views = layout.views(memory) if layout.expanded else {}
        for name, source in layout.expanded.items():
            source.read_into(views[name])
        return sum(source.stored_bytes for source in layout.expanded.values())

    def close(self) -> None:
        """End the threads and close the files; may be called twice."""
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, path: Path) -> ReadFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = ReadFile(path, self._direct)
            return self._files[path]
