"""The life of a store, and the steps at which it may be found after a crash in the middle of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.abi.optimizers import MasterFormat
from nearflash.abi.optimizers.state import BLOCK_PARAMS
from nearflash.bench.storage.disk import Flush, LoggedDisk, Write
from nearflash.storage.io.backend import IoBackend
from nearflash.storage.io.direct import aligned_buffer
from nearflash.storage.state.manifest import ADAM_ARRAYS, Extent, Manifest, StateArray
from nearflash.storage.state.master import join_master
from nearflash.storage.state.state_file import StateFile
from nearflash.storage.state.state_store import StateStore

__all__ = ["FORMATS", "MANIFEST", "Event", "Oracle", "Version", "record"]

Version = tuple[int, int]
"""A committed step and which history it belongs to: a step that was undone and made again has another content."""

_TENSORS = [("embed", (40, 30), "float32"), ("norm", (30,), "float32"), ("head", (1500,), "bfloat16")]
_WHOLE = 4
"""Of so many steps one changes all weights of a split master."""
_RESIDUAL = StateArray("residual", 1, 2), StateArray("residual_scale", 2, 16)
MANIFEST = Manifest.pack(
    _TENSORS,
    1024,
    (
        StateArray("p"),
        StateArray("m", 2, 1, "exp_avg"),
        StateArray("v", 1, 1, "exp_avg_sq"),
        StateArray("v_scale", 1, 32),
    ),
)
"""A tiny state: three extents of four arrays, each in a block."""
FORMATS = {
    "mixed": MANIFEST,
    "fp32, Top-K": Manifest.pack(_TENSORS, 1024, (*ADAM_ARRAYS, *_RESIDUAL)),
    "mx8, Top-K": Manifest.pack(
        _TENSORS,
        1024,
        (
            StateArray("p"),
            StateArray("m", 1, 1, "exp_avg"),
            StateArray("v", 1, 1, "exp_avg_sq"),
            StateArray("m_scale", 1, BLOCK_PARAMS),
            StateArray("v_scale", 1, BLOCK_PARAMS),
            *_RESIDUAL,
        ),
    ),
    "Muon": Manifest.pack(_TENSORS, 1024, (StateArray("p"), StateArray("m", torch_name="momentum_buffer"))),
    "split": Manifest.pack(
        [("head", (9000,), "bfloat16")],
        4096,
        (StateArray("p"), StateArray("m", 1, 1, "exp_avg"), StateArray("m_scale", 1, BLOCK_PARAMS)),
        MasterFormat.SPLIT,
    ),
}
"""States of other arrays."""


class Oracle:
    """The contents of every version, computed again from its number.

    A step leaves one extent of three as it was at the version before, which `write` notes. Of the weights of a split
    master most versions differ in a few words, so that changes alone are written.
    """

    def __init__(self, manifest: Manifest = MANIFEST) -> None:
        self.manifest = manifest
        self._memory = {
            array.name: aligned_buffer(array.extent_bytes(manifest.extents[0])) for array in manifest.stored
        }
        self._known: dict[tuple[Version, str, int], NDArray[np.uint8]] = {}
        self._before: dict[Version, Version] = {}

    def bytes_of(self, version: Version, array: StateArray, extent: Extent) -> NDArray[np.uint8]:
        """Bytes that the version holds there, aligned for direct I/O. Not to be written to."""
        while not self._changes(version, extent):
            version = self._before[version]
        key = version, array.name, extent.index
        if key not in self._known:
            memory = aligned_buffer(array.extent_bytes(extent))
            if array.name == "weight":
                self._put_weights(version, extent, memory.view(np.uint16)[: extent.params])
            elif version[0] or array.name in self.manifest.master.arrays:
                seed = [*version, self.manifest.stored.index(array), extent.index]
                size_bytes = array.size_bytes(extent.params)
                memory[:size_bytes] = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
            self._known[key] = memory
        return self._known[key]

    @staticmethod
    def _put_weights(version: Version, extent: Extent, words: NDArray[np.uint16]) -> None:
        """Finite numbers; every fourth step has others throughout."""
        words[:] = np.random.default_rng(extent.index).integers(0, 1 << 14, words.size, np.uint16) | 1
        if version[0] % _WHOLE == _WHOLE - 1:
            words ^= np.uint16(2)
        places = np.random.default_rng([*version, extent.index]).integers(0, words.size, 30)
        words[places] ^= np.uint16(4)

    def create(self, store: type[StateStore], paths: Sequence[Path], backend: IoBackend) -> StateStore:
        """A new store at version (0, 0)."""

        def initial(extent: Extent, out: NDArray[np.float32]) -> None:
            parts = [self.bytes_of((0, 0), self.manifest.array(name), extent) for name in self.manifest.parts("p")]
            if len(parts) == 1:
                out.view(np.uint8)[:] = parts[0]
            else:
                weight, rest = (part.view(np.uint16)[: out.size] for part in parts)
                join_master({"weight": weight, "rest": rest}, out)

        return store.create(paths, self.manifest, profile="ieee", initial=initial, direct=False, backend=backend)

    def note(self, version: Version, before: Version) -> None:
        """Have a version follow another, as `write` does."""
        self._before[version] = before

    def write(self, store: StateStore, version: Version) -> None:
        """Write every extent that the version changes."""
        now = store.steps, store.metadata.get("history", 0)
        self.note(version, now)
        for extent in self._extents(version):
            for array in self.manifest.stored:
                before = self.bytes_of(now, array, extent) if array.name == "weight" else None
                store.write(array.name, extent, self.bytes_of(version, array, extent), before)

    def commit(self, store: StateStore, version: Version) -> None:
        """Commit what was written."""
        changed = self._extents(version)
        store.commit(self._tensor_steps(version), {"history": version[1]}, extents=changed)

    def is_at(self, store: StateStore, version: Version) -> bool:
        """Whether all that the store holds is of that version, to the bit. Raises StateError where it is damaged."""
        if (store.steps, store.tensor_steps) != (version[0], self._tensor_steps(version)):
            return False
        if store.metadata != ({"history": version[1]} if version[0] else {}):
            return False
        for extent in self.manifest.extents:
            for array in self.manifest.stored:
                memory = self._memory[array.name][: array.extent_bytes(extent)]
                store.read(array.name, extent, memory)
                if not np.array_equal(memory, self.bytes_of(version, array, extent)):
                    return False
        return True

    def find_version(self, store: StateStore, versions: Sequence[Version]) -> Version | None:
        """Which of the versions the store is at; None where it is at none, or damaged."""
        try:
            return next((version for version in versions if self.is_at(store, version)), None)
        except StateError:
            return None

    def _extents(self, version: Version) -> list[Extent]:
        return [extent for extent in self.manifest.extents if self._changes(version, extent)]

    @staticmethod
    def _changes(version: Version, extent: Extent) -> bool:
        return version[0] == 0 or (version[0] + extent.index) % 3 != 0

    def _tensor_steps(self, version: Version) -> tuple[int, ...]:
        return (version[0],) * len(self.manifest.tensors)


class _KilledError(Exception):
    """The process is gone, here."""


@dataclass(frozen=True)
class Event:
    """Something that reached the log, and the versions at which the store may be found from then on.

    No versions: it was not yet there, and may be found at version (0, 0) or be refused.
    """

    what: Write | Flush | None
    versions: tuple[Version, ...]


def record(paths: Sequence[Path], disk: LoggedDisk, oracle: Oracle, steps: int) -> list[Event]:
    """The events of a life: a new store makes `steps` steps, undoes the last one and makes it again; opened again it is
    killed in a commit, when only the first file has its new superblock; opened again it makes a step and undoes it.

    The real files that it leaves have the names and sizes under which images of `disk` can be opened.
    """
    events: list[Event] = []

    class Recorded(StateStore):
        """A store whose parallel calls on all files are logged in an order of their own, not of the threads."""

        killed_in_commit = False

        def each(self, action: Callable[[StateFile], Any]) -> list[Any]:
            if self.killed_in_commit and action is StateFile.confirm:
                action(self._files[0])
                raise _KilledError
            start = len(disk.log)
            results = super().each(action)
            disk.log[start:] = _interleave(disk.log[start:])
            return results

    def during(versions: tuple[Version, ...], action: Callable[[], Any], after: Version | None = None) -> Any:
        start = len(disk.log)
        result = None
        with suppress(_KilledError):
            result = action()
        events.extend(Event(what, versions) for what in disk.log[start:])
        if after is not None:
            events.append(Event(None, (after,)))
        return result

    def step(store: StateStore, now: Version, new: Version, after: Version | None = None) -> None:
        during((now,), lambda: oracle.write(store, new))
        during((now, new), lambda: oracle.commit(store, new), after or new)

    with during((), lambda: oracle.create(Recorded, paths, disk), (0, 0)) as store:
        for number in range(steps):
            step(store, (number, 0), (number + 1, 0))
        during(((steps, 0), (steps - 1, 0)), store.rollback, (steps - 1, 0))
        step(store, (steps - 1, 0), (steps, 1))
    now, new = (steps, 1), (steps + 1, 1)
    with Recorded.open(paths, direct=False, backend=disk) as store:
        store.killed_in_commit = True
        # With one file the commit was complete; with more, the files at the older step decide.
        step(store, now, new, new if len(paths) == 1 else now)
    now = new if len(paths) == 1 else now
    with Recorded.open(paths, direct=False, backend=disk) as store:
        step(store, now, (now[0] + 1, 3))
        during(((now[0] + 1, 3), now), store.rollback, now)
    return events


def _interleave(log: Sequence[Write | Flush]) -> list[Write | Flush]:
    """First what each file was given first, then what each was given second: as many at once as can be in flight."""
    seen: Counter[int] = Counter()
    ranks = []
    for what in log:
        ranks.append((seen[what.file], what.file))
        seen[what.file] += 1
    return [log[index] for index in sorted(range(len(log)), key=ranks.__getitem__)]
