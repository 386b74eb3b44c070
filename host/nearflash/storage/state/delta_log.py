"""Deltas of the last steps, a file a step in a folder beside the state: written before the step is committed.

Each file is complete and durable, or not there; its name has the step. A file of a step that was never committed, or
that was undone, is not read: it is of a later step than the state's, or its weights before are not those after the file
before it. Fingerprints of all weights (nearflash.storage.state.fingerprint) bind the files to one another, and the last
one to the weights.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.abi.python310 import Self
from nearflash.device.backends.host.delta import Changes, changes_of, merge_changes
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.state.safetensors import StoredTensor, TensorFile, write_tensors
from nearflash.storage.state.snapshot import make_folder
from nearflash.storage.state.state_store import StateStore
from nearflash.support.tables import check_fields

__all__ = ["ACCEPTED", "RESERVED", "UNCOUNTED", "DeltaLog", "StepDelta", "TensorMark", "WeightDelta", "log_folder",
           "read_deltas"]  # fmt: skip

RESERVED = "nearflash"
"""Key of a state's metadata under which the optimizer keeps its own."""
UNCOUNTED = "uncounted"
"""Under it: commits that were no steps."""
ACCEPTED = "accepted"
"""Under it: the last step after which parameters were accepted that others had changed."""

_KEY = "nearflash_delta"
_NAME = re.compile(r"step-(\d{8,})\.delta")


def log_folder(state: Path) -> Path:
    """The folder of the deltas of a state whose first file this is."""
    return state.with_name(f"{state.name}.deltas")


def read_deltas(store: StateStore, since: int) -> "WeightDelta":
    """Merge what the steps after `since` changed, up to the store's. Raises StateError where they are not all kept."""
    own = store.metadata.get(RESERVED, {})
    if not isinstance(since, int) or isinstance(since, bool) or since < 0:
        raise StateError(f"since must be a step, a whole number from 0 on, not {since!r}")
    if since <= own.get(ACCEPTED, -1):
        raise StateError(
            f"since must be above {own[ACCEPTED]}, not {since}: others changed the weights after that step, and "
            "they were accepted; publish the whole weights"
        )
    step = store.steps - own.get(UNCOUNTED, 0)
    return DeltaLog(log_folder(store.paths[0])).read(store.identity, store.steps, step, since)


@dataclass(frozen=True)
class TensorMark:
    """A tensor of the weights: name, shape, dtype ("bfloat16"), and fingerprints before and after."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    before: int
    after: int

    def to_json(self) -> list[object]:
        """As JSON has it; fingerprints in hexadecimal."""
        return [self.name, list(self.shape), self.dtype, f"{self.before:016x}", f"{self.after:016x}"]

    @classmethod
    def from_json(cls, name: str, shape: list[int], dtype: str, before: str, after: str) -> Self:
        """From `to_json`. Raises ValueError."""
        return cls(name, tuple(map(int, shape)), dtype, int(before, 16), int(after, 16))


@dataclass(frozen=True, eq=False)
class StepDelta:
    """The delta of one commit: the store's step `commit`, the optimizer's step `step`.

    pieces: (tensor, first element, delta stream) of what the step updated.
    """

    identity: str
    commit: int
    step: int
    tensors: tuple[TensorMark, ...]
    pieces: tuple[tuple[int, int, NDArray[np.uint8]], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the streams."""
        return sum(stream.size for _, _, stream in self.pieces)

    def changes(self) -> dict[int, Changes]:
        """Find ascending flat indices and new words, by tensor. Raises StreamError."""
        found: dict[int, list[Changes]] = {}
        for tensor, first, stream in self.pieces:
            changes = changes_of(stream)
            if changes.indices.size:
                found.setdefault(tensor, []).append(Changes(changes.indices + first, changes.words))
        return {tensor: merge_changes(several) for tensor, several in found.items()}


@dataclass(frozen=True, eq=False)
class WeightDelta:
    """New words of all weights at step `step` that may differ from those at step `since`."""

    identity: str
    since: int
    step: int
    tensors: tuple[TensorMark, ...]
    changes: Mapping[str, Changes]
    """By tensor, for tensors with any: flat indices and words (bf16 and fp16 as uint16, fp32 as uint32)."""
    size_bytes: int = 0
    """Bytes of the steps' deltas that it was merged from."""

    @property
    def words(self) -> int:
        """Words of all tensors."""
        return sum(changes.indices.size for changes in self.changes.values())


class DeltaLog:
    """The folder of a state's deltas, of `max_bytes` bytes at most: the oldest make room."""

    def __init__(self, folder: Path, max_bytes: int = 0) -> None:
        self.folder, self._max_bytes = folder, max_bytes

    def write(self, delta: StepDelta) -> bool:
        """Make a step's delta durable, before its commit; whether it fits at all. Raises StorageFullError, StateError.

        Deltas of this step and later ones, of another history, go first, and then the oldest.
        """
        make_folder(self.folder)
        files = self._files()
        for commit in [commit for commit in files if commit >= delta.commit]:
            files.pop(commit).unlink(missing_ok=True)
        tensors = [StoredTensor(f"{tensor}@{first}", "U8", (stream.size,)) for tensor, first, stream in delta.pieces]
        about = {
            "identity": delta.identity,
            "commit": delta.commit,
            "step": delta.step,
            "tensors": [mark.to_json() for mark in delta.tensors],
        }
        text = json.dumps(about)
        room = delta.size_bytes + 2 * len(text) + 256 * (len(tensors) + 4)
        sizes = {commit: path.stat().st_size for commit, path in files.items()}
        while sizes and sum(sizes.values()) + room > self._max_bytes:
            oldest = min(sizes)
            del sizes[oldest]
            files[oldest].unlink(missing_ok=True)
        if room > self._max_bytes:
            return False
        streams = (stream for _, _, stream in delta.pieces)
        write_tensors(self._path(delta.commit), tensors, {_KEY: text}, streams)
        return True

    def read(self, identity: str, commit: int, step: int, since: int) -> WeightDelta:
        """Merge the deltas of the steps after `since` up to `step`, which the state is at with its commit.

        Raises StateError where they are not all there.
        """
        if not 0 <= since <= step:
            raise StateError(
                f"since must be a step from 0 to {step}, which the state beside {self.folder} is at, not {since}"
            )
        if since < step and not self.folder.is_dir():
            raise StateError(
                f"{self.folder} must be there, with what each step changed, but this state keeps nothing: give the "
                "optimizer delta_bytes (any GB) and make a step, or publish the whole weights"
            )
        steps: list[StepDelta] = []
        while step - len(steps) > since:
            wanted = commit - len(steps)
            path = self._path(wanted)
            if not path.is_file():
                raise self._missing(since, step - len(steps))
            found = _read(path)
            later = steps[-1] if steps else None
            if (found.identity, found.commit, found.step) != (identity, wanted, step - len(steps)) or (
                later is not None and not _follows(found, later)
            ):
                raise self._missing(since, step - len(steps))
            steps.append(found)
        if not steps:
            return WeightDelta(identity, since, step, (), {})
        return _merge(since, steps[::-1])

    def _missing(self, since: int, first: int) -> StateError:
        return StateError(
            f"since must be at least {first}, not {since}: {self.folder} has no delta of step {first} any more, or the "
            "weights were changed then by others; publish the whole weights, or give delta_bytes more"
        )

    def _files(self) -> dict[int, Path]:
        named = {path: _NAME.fullmatch(path.name) for path in self.folder.iterdir()}
        return {int(match[1]): path for path, match in named.items() if match}

    def _path(self, commit: int) -> Path:
        return self.folder / f"step-{commit:08d}.delta"


def _read(path: Path) -> StepDelta:
    file = TensorFile(path)
    try:
        about = json.loads(file.metadata[_KEY])
        check_fields(f"the metadata of {path}", about, identity=str, commit=int, step=int, tensors=list)
        marks = tuple(TensorMark.from_json(*mark) for mark in about["tensors"])
        pieces = []
        for name, tensor in file.tensors.items():
            stream = file.read(name, 0, tensor.size_bytes)
            file.check(name, crc32c(stream))
            number, first = map(int, name.split("@"))
            marks[number]
            pieces.append((number, first, stream))
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise StateError(f"{path} must be the delta of a step ({error}); publish the whole weights") from error
    return StepDelta(about["identity"], about["commit"], about["step"], marks, tuple(pieces))


def _follows(earlier: StepDelta, later: StepDelta) -> bool:
    """Whether the weights after the one are those before the other."""
    after = [(mark.name, mark.shape, mark.dtype, mark.after) for mark in earlier.tensors]
    return after == [(mark.name, mark.shape, mark.dtype, mark.before) for mark in later.tensors]


def _merge(since: int, steps: Sequence[StepDelta]) -> WeightDelta:
    first, last = steps[0], steps[-1]
    every: dict[int, list[Changes]] = {}
    for delta in steps:
        for tensor, changes in delta.changes().items():
            every.setdefault(tensor, []).append(changes)
    marks = tuple(
        TensorMark(new.name, new.shape, new.dtype, old.before, new.after)
        for old, new in zip(first.tensors, last.tensors, strict=True)
    )
    merged = {marks[tensor].name: merge_changes(several) for tensor, several in sorted(every.items())}
    size_bytes = sum(delta.size_bytes for delta in steps)
    return WeightDelta(last.identity, since, last.step, marks, merged, size_bytes)
