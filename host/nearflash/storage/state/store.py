"""The state of an optimizer on one file or on several, one a device: master parameters and moments, in two slots.

A step reads the current slot of each file and writes every extent of the spare one. A commit writes each file's table
of checksums and flushes every file; then it writes each file's superblock and flushes every file again. Since a step
rewrites everything anyway, the second slot costs capacity and no bandwidth.

What a state file promises:

1. After any crash the store opens at the last committed step or the one before it, never at a mix. All files change
   their superblocks after all have flushed, and the next step's writes begin after that: so files differ by one step
   at most, and a store whose files differ opens at the smaller one.
2. Every extent has a CRC32C, checked at each read; damage is named by file, array, tensors, parameters and offset.
3. A file that is misdirected, of another version, short, damaged, of another state or history, or dealt otherwise,
and a set from which a file is missing, are refused by name and left as they are. Files may be given in any order.
4. No space, an I/O error, a short read or write leave the last step as it is, and the store usable.
5. A failed flush ends the use of the open store: what the drives hold can be told only by opening it again.
6. `rollback` gives exactly the step before, until the next write begins; `snapshot` exactly the committed step.

Limits: the checksums are computed by the host's CPU over the memory that is passed in; where that is a window onto
device memory on a board, the bytes cross the host link once more (a checksum unit in the device is to replace it).
"""

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import FormatError, ShapeError, StateError
from nearflash.storage.io.buffers import BufferPool
from nearflash.storage.io.direct import Engine, partial_of
from nearflash.storage.state.file import StateFile
from nearflash.storage.state.files import StateSet, in_order
from nearflash.storage.state.layout import EXTRA_BYTES
from nearflash.storage.state.manifest import Extent, Manifest
from nearflash.storage.state.snapshot import copy, snapshot_paths
from nearflash.storage.state.stripe import Deal
from nearflash.storage.state.superblock import Stamp

__all__ = ["StateStore"]

Fill = Callable[[str, Extent, NDArray[np.uint8]], None]


class StateStore(StateSet):
    """An open, locked state at one of its committed steps. Use `create`, `build` or `open`, then `close`.

    `read` and `write` may be called from many threads at once; all else while no other call is under way.
    """

    def __init__(self, files: Sequence[StateFile]) -> None:
        """Not for callers: see `create` and `open`."""
        super().__init__(files)
        self._poisoned = False
        self._settled, self._settling = False, threading.Lock()
        self._spare_written = self._spare_checked = False

    # Life

    @classmethod
    def create(
        cls,
        paths: Path | Sequence[Path],
        manifest: Manifest,
        *,
        profile: str,
        initial: Callable[[Extent, NDArray[np.float32]], None],
        extra: Mapping[str, Any] | None = None,
        weights: Iterable[int] | None = None,
        direct: bool = True,
        engine: Engine | None = None,
    ) -> Self:
        """A new state at step 0: `initial(extent, out)` gives the parameters, all other arrays are zero bytes.

        weights: integers, how many extents each file gets in turn; evenly unless given.
        The files appear under their names only when all are complete and durable; before that they are *.partial.
        Raises StateError where a path exists, StorageFullError where a disk has no room (nothing is left behind).
        """

        def fill(array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
            if array == "p":
                initial(extent, memory.view(np.float32))

        stamp = Stamp(secrets.token_hex(8), str(profile), 0, secrets.token_hex(8))
        steps = (0,) * len(manifest.tensors)
        files = [paths] if isinstance(paths, Path) else list(paths)
        deal = Deal.among(len(files), weights)
        return cls.build(files, manifest, fill, deal, stamp, steps, extra or {}, direct=direct, engine=engine)

    @classmethod
    def build(
        cls,
        paths: Sequence[Path],
        manifest: Manifest,
        fill: Fill,
        deal: Deal,
        stamp: Stamp,
        tensor_steps: Sequence[int],
        extra: Mapping[str, Any],
        *,
        direct: bool = True,
        engine: Engine | None = None,
    ) -> Self:
        """A new state at the stamp's step; `fill(array, extent, memory)` gives each extent's bytes (zero before).

        Files and errors as of `create`.
        """
        paths = [Path(path) for path in paths]
        for path in paths:
            if path.exists() or paths.count(path) > 1:
                raise StateError(f"{path} must not exist yet and be given once; open it, or choose another path")
        files: list[StateFile] = []
        buffers = BufferPool()
        try:
            for index, path in enumerate(paths):
                files.append(StateFile.create(path, manifest, deal, index, direct=direct, engine=engine))
            store = cls(files)
            for extent in manifest.extents:
                for array in manifest.arrays:
                    with buffers.take(array.extent_bytes(extent)) as memory:
                        memory[:] = 0
                        fill(array.name, extent, memory)
                        files[deal.file_of(extent)].write(stamp.step, array.name, extent, memory)
            store._commit(stamp, tensor_steps, extra)
            for file, path in zip(files, paths, strict=True):
                file.publish(path)
        except BaseException:
            for file in files:
                file.path.unlink(missing_ok=True)
                file.close()
            raise
        return store

    @classmethod
    def open(cls, paths: Path | Sequence[Path], *, direct: bool = True, engine: Engine | None = None) -> Self:
        """An existing state, at the last step that all files have. Raises StateError; changes nothing that is stored.

        Where a creation was cut short while it gave the files their names, the rest of them get theirs.
        """
        wanted = [paths] if isinstance(paths, Path) else [Path(path) for path in paths]
        begun = any(path.exists() for path in wanted)
        files: list[StateFile] = []
        try:
            for path in wanted:
                unnamed = begun and not path.exists() and partial_of(path).exists()
                files.append(StateFile.open(partial_of(path) if unnamed else path, direct=direct, engine=engine))
            store = cls(in_order(files))
            for file, path in zip(files, wanted, strict=True):
                if file.path != path:
                    file.publish(path)
            return store
        except BaseException:
            for file in files:
                file.close()
            raise

    # Use

    def write(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        """Write `memory` to the spare slot; it counts from `commit` on. Raises StorageFullError, StateError."""
        if not self._settled:
            self._settle()
        self._check_usable()
        self._spare_written = True
        self._files[self.device_of(extent)].write(self.steps + 1, array, extent, memory)

    def commit(self, tensor_steps: Sequence[int], extra: Mapping[str, Any] | None = None) -> None:
        """Make the spare slot the current one, durably, with new `extra` where that is given.

        Raises StateError where extents were not written, FormatError where `extra` is not JSON or too long.
        """
        if missing := sum(file.missing for file in self._files):
            raise StateError(f"every extent must be written before a commit; {missing} are not")
        self._check_usable()
        stamp = Stamp(self.identity, self.profile, self.steps + 1, secrets.token_hex(8))
        self._commit(stamp, tensor_steps, self.extra if extra is None else extra)

    def discard(self) -> None:
        """Forget what was written since the last commit."""
        for file in self._files:
            file.discard()

    def rollback(self) -> None:
        """Undo the last commit, durably: the store is at the step before, exactly. Only until the next write begins.

        Raises StateError, changing nothing, where that step is not there any more. Where the store was just opened
        the step is read through first.
        """
        self._check_usable()
        if self._spare_written:
            raise StateError(f"a rollback must come before the next write begins; step {self.steps} stays")
        versions = [file.previous() for file in self._files]
        if not self._spare_checked:
            for file, version in zip(self._files, versions, strict=True):
                if damage := file.verify(version):
                    raise StateError(
                        f"step {version.stamp.step} was written over and step {self.steps} stays: {damage[0]}"
                    )
        for file, version in zip(self._files, versions, strict=True):
            file.step_back(version)
        self._settled = False
        self._settle()

    def snapshot(self, folder: Path) -> list[Path]:
        """Files of the committed step in a folder (made where it is missing), for `open`: reflinks or copies.

        Writes may be under way, but no commit. Raises StateError where a file exists or this one is damaged,
        StorageFullError.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = snapshot_paths(self.paths, Path(folder))
        try:
            self.each(lambda file: copy(file, paths[file.index]))
        except BaseException:
            for path in paths:
                path.unlink(missing_ok=True)
            raise
        return paths

    # Steps of a commit

    def _commit(self, stamp: Stamp, tensor_steps: Sequence[int], extra: Mapping[str, Any]) -> None:
        if len(tensor_steps) != len(self.manifest.tensors):
            raise ShapeError(f"tensor_steps must be of {len(self.manifest.tensors)} tensors, not {len(tensor_steps)}")
        values = _as_json(extra)
        self.each(lambda file: file.prepare(stamp, tensor_steps, values))
        self._poisoned = True  # A failed flush leaves unknown what the drives hold: only opening again can tell.
        self.each(StateFile.flush)
        self.each(StateFile.confirm)
        self._poisoned = False
        for file in self._files:
            file.adopt()
        self._settled, self._spare_checked, self._spare_written = True, True, False

    def _settle(self) -> None:
        with self._settling:
            if not self._settled:
                self._check_usable()
                self._poisoned = True
                self.each(StateFile.settle)
                self._poisoned, self._settled = False, True

    def _check_usable(self) -> None:
        if self._poisoned:
            raise StateError(
                f"{self.paths[0]}: a flush failed, so the drive's contents are unknown; close and open again"
            )


def _as_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FormatError(f"extra must be finite JSON values, not what fails with: {error}") from error
    if len(text) > EXTRA_BYTES:
        raise FormatError(f"extra must fit {EXTRA_BYTES} bytes of JSON, not {len(text)}; keep large values elsewhere")
    values: dict[str, Any] = json.loads(text)
    return values
