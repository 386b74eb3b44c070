"""Places of a layer's parameters in one buffer, into which its file is read without a copy.

Tensors that are stored as the model computes with them keep their distances in the file, in runs that begin at a block
of it: direct I/O then puts each where it is used, without a copy. So it does with the pieces of a fused parameter, of
which only the bytes of the first and last block are copied. Tensors that have a checksum are checked there. The others
are expanded or converted behind them; where the buffer is copied to a far memory, what is expanded there is read in
runs, too.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import mul

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.errors import WeightsError
from nearflash.offload.tiers.link import Spans
from nearflash.offload.weights.compressed import CompressedPiece, CompressedPieces, pad_bytes, source_crosses_as_stored
from nearflash.offload.weights.staging import StagedPiece, StagedReader, StagedReads
from nearflash.planning.policy import STAGED_TENSORS
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.storage.io.unchanged import UnchangedFile
from nearflash.support.threads import map_all, set_ieee_arithmetic
from nearflash.weights.file import WeightsTensor
from nearflash.weights.sources import Source, SourcePiece
from nearflash.weights.weights_map import TORCH_DTYPES, KeptTensor

__all__ = ["BufferLayout", "FileRun", "LayoutReader", "read_run"]

GAP_BYTES = 256 << 10
"""Cheaper to read than to ask once more."""
_PART_BYTES = 16 << 20
"""Of one request."""
_READERS = 2
"""Requests in flight; more were not faster (nearflash.storage.io.bandwidth)."""


@dataclass(frozen=True)
class FileRun:
    """Bytes of a file and their place in the buffer, which lie alike in their blocks.

    One that begins at a block takes whole blocks of the buffer, unless it is `exact`: then not a byte beside its own.
    """

    file: UnchangedFile
    offset: int
    size_bytes: int
    """To the end of the last tensor."""
    buffer_offset: int
    what: str
    """The first tensor's name, for errors."""
    exact: bool = False

    @property
    def room_bytes(self) -> int:
        """In the buffer."""
        return self.size_bytes if self.exact else -(-self.size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def short_error(self, done: int) -> WeightsError:
        """The error where the file has `done` bytes of these alone."""
        return WeightsError(
            f"{self.file.path}: tensor {self.what!r}, at byte {self.offset}, or one after it: the file ends "
            f"{self.size_bytes - done} bytes too early"
        )

    def parts(self) -> Iterator["FileRun"]:
        """Requests of a size that keeps a drive busy, from block to block."""
        at = 0
        while at < self.size_bytes:
            size = min(_PART_BYTES - (self.offset + at) % BLOCK_BYTES, self.size_bytes - at)
            yield replace(self, offset=self.offset + at, size_bytes=size, buffer_offset=self.buffer_offset + at)
            at += size


class BufferLayout:
    """The buffer of one layer. gap_bytes: between two tensors of a file that are read rather than skipped. far: it is
    copied to a far memory, where `compressed` is expanded.
    """

    def __init__(self, sources: Mapping[str, Source], gap_bytes: int = GAP_BYTES, *, far: bool = False) -> None:
        self._gap_bytes = gap_bytes
        self.runs: list[FileRun] = []
        self.expanded: dict[str, Source] = {}
        """What is not read in runs."""
        self._places: dict[str, tuple[int, Source]] = {}
        self._unchecked: list[tuple[int, WeightsTensor]] = []
        """Tensors that are read in runs and have a checksum, and where they lie, until they were found right."""
        direct = {name: source for name, source in sources.items() if _is_direct(source)}
        stored = {name: source for name, source in sources.items() if far and source_crosses_as_stored(source)}
        pieces = [CompressedPiece(name, piece, 0) for name, source in stored.items() for piece in source.pieces]
        in_files = [piece for piece in pieces if type(piece.piece.tensor) is WeightsTensor]
        offsets = self._place_runs(
            [*(source.pieces[0].tensor for source in direct.values()), *(each.piece.tensor for each in in_files)]
        )
        for (name, source), offset in zip(direct.items(), offsets, strict=False):
            self._places[name] = (offset, source)
        in_files = [replace(each, offset=at) for each, at in zip(in_files, offsets[len(direct) :], strict=True)]
        size = sum(run.room_bytes for run in self.runs)
        for name, source in sources.items():
            if name not in direct and name not in stored and (starts := _starts_of_pieces(source)):
                offset = size + (source.pieces[0].tensor.offset - starts[0]) % BLOCK_BYTES
                self._place_pieces(offset, starts, source)
                self._places[name] = (offset, source)
                size = -(-(offset + source.size_bytes) // BLOCK_BYTES) * BLOCK_BYTES
        in_memory = []
        for each in pieces:
            if isinstance(each.piece.tensor, KeptTensor):
                in_memory.append(replace(each, offset=size))
                size += pad_bytes(each.piece.tensor.stored_bytes)
        self.compressed = CompressedPieces(stored, in_files + in_memory, size)
        """What is expanded in the far memory."""
        size = self.stored_end = self.compressed.end
        """Of the buffer's bytes that are as they are stored, their tables included; the host expands what is behind."""
        for name, source in sources.items():
            if name not in self._places and name not in stored:
                self.expanded[name] = source
                self._places[name] = (size, source)
                size += pad_bytes(source.size_bytes)
        self.size_bytes = -(-size // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def stored_bytes(self) -> int:
        """Bytes of memory in which the layer is kept as it is stored."""
        return self.stored_end + sum(source.stored_bytes for source in self.expanded.values())

    @property
    def largest_staged(self) -> int:
        """Stored bytes of the largest tensor that is read to be expanded by the host."""
        sizes = (piece.tensor.stored_bytes for _, piece in _pieces(self) if _is_staged(piece))
        return max(sizes, default=0)

    @property
    def dense_spans(self) -> tuple[Spans, Spans]:
        """Bytes of the buffer that parameters have which are dense in it: of those that are read so, and of those that
        the host expands.
        """
        bounds = sorted((offset, offset + source.size_bytes) for offset, source in self._places.values())
        read = [span for span in bounds if span[0] < self.stored_end]
        return read, bounds[len(read) :]

    @property
    def is_checked(self) -> bool:
        """Whether no tensor waits for its checksum to be compared."""
        return not self._unchecked

    def check(self, memory: Tensor) -> None:
        """Compare what was read in runs with the file's checksums, where it has them, the first time: for later reads
        the drive's own codes must do, else each step of decode would take a tenth longer. Raises WeightsError.
        """
        for offset, tensor in self._unchecked:
            tensor.check(memory[offset : offset + tensor.stored_bytes].numpy())
        self._unchecked.clear()

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The parameters in a buffer (size_bytes,) uint8."""
        return {
            name: memory[offset : offset + source.size_bytes].view(source.dtype).view(source.shape)
            for name, (offset, source) in self._places.items()
        }

    def _place_runs(self, tensors: Sequence[WeightsTensor]) -> list[int]:
        """Offsets in the buffer of tensors of files, which are read in runs."""
        offset = 0
        run: FileRun | None = None
        offsets = [0] * len(tensors)
        for number in sorted(range(len(tensors)), key=lambda number: _key(tensors[number])):
            tensor = tensors[number]
            end = tensor.offset + tensor.stored_bytes
            if (
                run is None
                or run.file is not tensor.file
                or tensor.offset > run.offset + run.size_bytes + self._gap_bytes
            ):
                if run is not None:
                    self.runs.append(run)
                    offset += run.room_bytes
                start = tensor.offset - tensor.offset % BLOCK_BYTES
                run = FileRun(tensor.file, start, end - start, offset, tensor.name)
            else:
                run = FileRun(run.file, run.offset, max(end - run.offset, run.size_bytes), offset, run.what)
            offsets[number] = offset + tensor.offset - run.offset
            self._read_to(offsets[number], tensor)
        if run is not None:
            self.runs.append(run)
        return offsets

    def _place_pieces(self, offset: int, starts: Sequence[int], source: Source) -> None:
        for start, piece in zip(starts, source.pieces, strict=True):
            tensor = piece.tensor
            self.runs.append(
                FileRun(tensor.file, tensor.offset, tensor.stored_bytes, offset + start, tensor.name, exact=True)
            )
            self._read_to(offset + start, tensor)

    def _read_to(self, offset: int, tensor: WeightsTensor) -> None:
        if tensor.checksum is not None or tensor.stream_checksum is not None:
            self._unchecked.append((offset, tensor))


def _key(tensor: WeightsTensor) -> tuple[str, int]:
    return str(tensor.path), tensor.offset


def _is_direct(source: Source) -> bool:
    """Whether a parameter is one tensor as it lies in a file."""
    alone = source.converter is None and len(source.pieces) == 1 and not source.pieces[0].place
    return alone and _as_stored(source.pieces[0].tensor, source)


def _as_stored(tensor: WeightsTensor, source: Source) -> bool:
    same = tensor.form == "dense" and TORCH_DTYPES.get(tensor.dtype) is source.dtype
    return same and type(tensor) is WeightsTensor and tensor.offset % source.dtype.itemsize == 0


def _starts_of_pieces(source: Source) -> list[int]:
    """First bytes of a parameter's pieces within it, as they lie in files; none where direct I/O cannot put them there:
    blocks of all pieces must begin alike in the file and in the parameter.
    """
    if source.converter is not None or not all(_as_stored(piece.tensor, source) for piece in source.pieces):
        return []
    starts = []
    for piece in source.pieces:
        indices = [index.start or 0 if isinstance(index, slice) else index for index in piece.place]
        if any(isinstance(index, slice) for index in piece.place[:-1]):
            return []  # rows here and there
        strides = [prod(source.shape[axis + 1 :]) for axis in range(len(indices))]
        starts.append(sum(map(mul, indices, strides)) * source.dtype.itemsize)
    shifts = {(piece.tensor.offset - start) % BLOCK_BYTES for piece, start in zip(source.pieces, starts, strict=True)}
    return starts if len(shifts) == 1 else []


def read_run(run: FileRun, memory: Tensor, direct: bool = True) -> None:
    """Fill a run's place in a buffer. direct: past the page cache where the file system can.

    Raises WeightsError where the file is shorter, was changed since it was opened, or reading fails.
    """
    view = memory[run.buffer_offset : run.buffer_offset + run.room_bytes].numpy()
    try:
        done = _read_exact(run, view, direct) if run.exact else run.file.scatter([view.data], run.offset, direct)
    except OSError as error:
        raise WeightsError(f"{run.file.path}: reading {run.what!r} failed ({error.strerror})") from error
    if done < run.size_bytes:
        raise run.short_error(done)


def _read_exact(run: FileRun, view: NDArray[np.uint8], direct: bool) -> int:
    """Read whole blocks into their place, of the first and the last what is of the run; returns its bytes read."""
    before = run.offset % BLOCK_BYTES
    head = min(BLOCK_BYTES - before, run.size_bytes) if before else 0
    tail = (run.size_bytes - head) % BLOCK_BYTES
    end = run.size_bytes - tail
    first, last = reuse_buffer(2 * BLOCK_BYTES).reshape(2, BLOCK_BYTES)
    blocks = [(head, first), (end - head, view[head:end]), (tail, last)]
    memories = [block.data for size, block in blocks if size]
    done = run.file.scatter(memories, run.offset - before, direct) - before
    view[:head] = first[before : before + head]
    view[end:] = last[:tail]
    return done


class LayoutReader:
    """Fills buffers by their layouts, from files that stay open; any thread may ask. direct: past the page cache."""

    def __init__(self, direct: bool = True) -> None:
        self._direct = direct
        self._pool = ThreadPoolExecutor(_READERS, "nearflash-read", initializer=set_ieee_arithmetic)
        self._staged = StagedReader(_READERS)
        # More than there are processors would only keep stages from the drive.
        threads = min(STAGED_TENSORS, os.cpu_count() or 1)
        self._expanding = ThreadPoolExecutor(threads, "nearflash-expand", initializer=set_ieee_arithmetic)

    def read_runs(self, layout: BufferLayout, memory: Tensor) -> int:
        """Read what lies in runs, and check it; the bytes of it. Raises WeightsError."""
        parts = [part for run in layout.runs for part in run.parts()]
        if len(parts) == 1:
            read_run(parts[0], memory, self._direct)
        else:
            map_all(self._pool, lambda part: read_run(part, memory, self._direct), parts)
        layout.check(memory)
        return sum(part.size_bytes for part in parts)

    def begin(self, layout: BufferLayout) -> AbstractContextManager[StagedReads]:
        """Read what the host expands, before there is memory to expand it into; for `expand`, inside of the block."""
        return self._staged.begin((name, piece) for name, piece in _pieces(layout) if _is_staged(piece))

    def expand(self, layout: BufferLayout, memory: Tensor, reads: StagedReads) -> int:
        """Expand what does not lie in runs, of `reads` that were begun for it; the stored bytes of it that the host
        reads. Raises WeightsError.
        """
        views = layout.views(memory) if layout.expanded else {}
        map_all(self._expanding, lambda job: job(), _list_jobs(layout, views, reads))
        return sum(source.host_bytes for source in layout.expanded.values())

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._pool.shutdown()
        self._staged.close()
        self._expanding.shutdown()


def _pieces(layout: BufferLayout) -> Iterator[tuple[str, SourcePiece]]:
    """Pieces that are put into their places one by one, and the parameter of each."""
    for name, source in layout.expanded.items():
        if source.converter is None:
            yield from ((name, piece) for piece in source.pieces)


def _is_staged(piece: SourcePiece) -> bool:
    """Whether the host reads it first: it is not in memory, and no device expands it beside the drive."""
    return piece.tensor.is_expanded_by_host and not isinstance(piece.tensor, KeptTensor)


def _list_jobs(layout: BufferLayout, views: Mapping[str, Tensor], reads: StagedReads) -> Iterator[Callable[[], None]]:
    """List what fills the views, and wait for reads."""
    for name, source in layout.expanded.items():
        if source.converter is not None:
            yield partial(source.read_into, views[name])
    for name, piece in _pieces(layout):
        if not _is_staged(piece):
            yield partial(piece.read_into, views[name])
    for staged in reads:
        yield partial(_expand_into_place, staged, views[staged.name])


def _expand_into_place(staged: StagedPiece, parameter: Tensor) -> None:
    try:
        staged.piece.read_into(parameter)
    finally:
        staged.release()
