"""The state of an optimizer on one file or on several, one a device: master parameters and moments, in two slots.

A step reads the extents that it changes and writes each into the slot that the step before does not use for it; the
others stay. A commit writes each file's table of slots and checksums and flushes every file; then it writes each file's
superblock and flushes every file again. Since a step rewrites what it reads anyway, the second slot costs capacity and
no bandwidth.

What a state file promises:

1. After any crash the store opens at the last committed step or the one before it, never at a mix. All files change
   their superblocks after all have flushed, and the next step's writes begin after that: so files differ by one step
   at most, and a store whose files differ opens at the smaller one.
2. Every extent has a CRC32C, checked at each read; damage is named by file, array, tensors, parameters and offset.
3. A file of another kind or version, a short or damaged one, one of another state, history or stripe, and a state of
   which a file is missing are rejected with a named error and stay as they are. Files may be given in any order.
4. No space, an I/O error, a short read or write leave the last step as it is, and the store usable.
5. A failed flush ends the use of the open store: only opening it again tells what the drives hold.
6. `rollback` gives exactly the step before, until the next write begins; `snapshot` exactly the committed step.

Limits: the checksums are computed by the host's CPU over the memory that is passed in; where that is a window onto
device memory on a board, the bytes cross the host link once more (a checksum unit in the device is to replace it).
"""

import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import ShapeError, StateError
from nearflash.storage.io.backend import IoBackend
from nearflash.storage.io.direct import aligned_buffer, partial_of
from nearflash.storage.state.assembly import Fill, create_files, discard_files, fill_files, open_files, publish_files
from nearflash.storage.state.manifest import Extent, Manifest
from nearflash.storage.state.metadata import decode_metadata, encode_metadata
from nearflash.storage.state.snapshot import copy, fill_folder, snapshot_paths
from nearflash.storage.state.state_file import StateFile
from nearflash.storage.state.stripe import Stripe
from nearflash.storage.state.superblock import Stamp
from nearflash.support.closing import Closing
from nearflash.support.files import give_name
from nearflash.support.threads import map_all

__all__ = ["StateStore"]

T = TypeVar("T")


class StateStore(Closing):
    """An open, locked state at one of its committed steps. Use `create`, `build` or `open`, then `close`.

    `read` and `write` may be called from many threads at once; all else while no other call runs.
    """

    def __init__(self, files: Sequence[StateFile]) -> None:
        """Not for callers: see `create` and `open`. files: in stripe order, at the same step."""
        self._files = tuple(files)
        self._threads = ThreadPoolExecutor(len(files)) if len(files) > 1 else None
        self._poisoned = self.closed = False
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
        metadata: Mapping[str, Any] | None = None,
        stripe_ratio: Iterable[int] | None = None,
        direct: bool = True,
        backend: IoBackend | None = None,
    ) -> Self:
        """A new state at step 0: `initial(extent, out)` gives the parameters, all other arrays are zero bytes.

        stripe_ratio: integers, the extents of each file in a round; even unless given.
        The files appear under their names only when all are complete and durable; before that they are *.partial.
        Raises StateError where a path exists, StorageFullError where a disk has no room (nothing is left then).
        """

        def fill(array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
            if array == "p":
                initial(extent, memory.view(np.float32))

        stamp = Stamp(secrets.token_hex(8), str(profile), 0, secrets.token_hex(8))
        steps = (0,) * len(manifest.tensors)
        files = [paths] if isinstance(paths, Path) else list(paths)
        stripe = Stripe.among(len(files), stripe_ratio)
        return cls.build(files, manifest, fill, stripe, stamp, steps, metadata or {}, direct=direct, backend=backend)

    @classmethod
    def build(
        cls,
        paths: Sequence[Path],
        manifest: Manifest,
        fill: Fill,
        stripe: Stripe,
        stamp: Stamp,
        tensor_steps: Sequence[int],
        metadata: Mapping[str, Any],
        *,
        direct: bool = True,
        backend: IoBackend | None = None,
    ) -> Self:
        """A new state at the stamp's step, of any content. Files and errors as of `create`."""
        paths = [Path(path).absolute() for path in paths]
        files = create_files(paths, manifest, stripe, direct=direct, backend=backend)
        try:
            store = cls(files)
            fill_files(files, stamp.step, fill)
            store._commit(stamp, tensor_steps, metadata)
            publish_files(files, paths)
        except BaseException:
            discard_files(files)
            raise
        return store

    def replace(
        self, manifest: Manifest, fill: Fill, stamp: Stamp, tensor_steps: Sequence[int], metadata: Mapping[str, Any]
    ) -> Self:
        """A state of other content in this one's files, complete and durable or not there at all; this one is closed.

        `fill` may read this store. Needs room for both. Raises StorageFullError, StateError, with this one as it was;
        but where the files cannot be given their names, opening again finds the new state.
        """
        self._check_usable()
        self.check_names()
        paths, files = [file.path for file in self._files], self._files
        new = create_files(paths, manifest, files[0].stripe, direct=files[0].direct, backend=files[0].backend,
                           replacing=True)  # fmt: skip
        try:
            store = type(self)(new)
            fill_files(new, stamp.step, fill)
            store._commit(stamp, tensor_steps, metadata)
        except BaseException:
            discard_files(new)
            raise
        try:
            self.check_names()
            publish_files(new, paths, replacing=True)
        except BaseException:
            self._poisoned = any(file.path in paths for file in new)
            if self._poisoned:
                store.close()
            else:
                discard_files(new)
            raise
        self.close()
        return store

    def check_names(self) -> None:
        """Raise StateError where another file has the name of one of these, or none: what stands there is not ours."""
        for file in self._files:
            if not file.has_its_name():
                raise StateError(
                    f"{file.path} must be the file that was opened, but it was moved, removed or replaced: put it "
                    "back, or keep what is open with a snapshot in another folder, and go on from that"
                )

    @classmethod
    def open(
        cls, paths: Path | Sequence[Path], *, direct: bool = True, backend: IoBackend | None = None,
        writable: bool = True,
    ) -> Self:  # fmt: skip
        """An existing state, at the last step that all files have. Raises StateError; changes nothing that is stored.

        writable: else its files are only read, and may lie where nothing can be written.

        Where a creation was cut short while it gave the files their names, the rest of them get theirs.
        """
        wanted = [paths] if isinstance(paths, Path) else [Path(path) for path in paths]
        files = [path.absolute() for path in wanted]
        return cls(open_files(files, direct=direct, backend=backend, writable=writable))

    def close(self) -> None:
        """Release files and locks; what was not committed is forgotten. It may be called twice."""
        self.closed = True
        if self._threads:
            self._threads.shutdown()
        for file in self._files:
            file.close()

    # What it is

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in stripe order."""
        return tuple(file.path for file in self._files)

    @property
    def manifest(self) -> Manifest:
        """Tensors, arrays and extents."""
        return self._files[0].manifest

    @property
    def stripe_ratio(self) -> tuple[int, ...]:
        """Extents of each file in a round."""
        return self._files[0].stripe.ratio

    @property
    def stamp(self) -> Stamp:
        """Identity, profile, step and commit."""
        return self._files[0].version.stamp

    @property
    def identity(self) -> str:
        """16 hexadecimal digits drawn at creation: tells this state and its copies from all others."""
        return self.stamp.identity

    @property
    def profile(self) -> str:
        """Operation order of the update."""
        return self.stamp.profile

    @property
    def steps(self) -> int:
        """Committed steps."""
        return self.stamp.step

    @property
    def tensor_steps(self) -> tuple[int, ...]:
        """Updates that each tensor has had, in the manifest's order."""
        return self._files[0].version.tensor_steps

    @property
    def metadata(self) -> dict[str, Any]:
        """Values committed beside the arrays: plain values, equal to those that were given."""
        return decode_metadata(self._files[0].version.metadata)

    def device_of(self, extent: Extent) -> int:
        """Which of the files holds the extent."""
        return self._files[0].stripe.file_of(extent)

    def extents_of(self, device: int) -> tuple[Extent, ...]:
        """The extents of one of the files, in order."""
        return self._files[device].layout.extents

    # Use

    def read(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        """Fill `memory` (page aligned, `array.extent_bytes(extent)`) with what is committed. Raises StateError."""
        self._files[self.device_of(extent)].read(array, extent, memory)

    def holds(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> bool:
        """Whether `memory` is what is committed of a stored array, by its checksum; reads nothing."""
        return self._files[self.device_of(extent)].holds(array, extent, memory)

    def read_array(self, array: str) -> NDArray[Any]:
        """A whole committed array without the padding of its extents: fp32, else unsigned words. Raises StateError."""
        stored = self.manifest.array(array)
        parts = []
        for extent in self.manifest.extents:
            memory = aligned_buffer(stored.extent_bytes(extent))
            self.read(array, extent, memory)
            parts.append(memory[: stored.size_bytes(extent.params)])
        return np.concatenate(parts).view(np.float32 if stored.element_bytes == 4 else f"<u{stored.element_bytes}")

    def verify(self) -> list[str]:
        """Read everything that is committed; one message for each damaged extent."""
        return [message for messages in self.each(StateFile.verify) for message in messages]

    def begin_uncompared(self, extent: Extent) -> bool:
        """Whether a step that begins may give `write` no `before`: it would not pay, by what the last ones changed."""
        return self._files[self.device_of(extent)].begin_uncompared(extent)

    def write(
        self, array: str, extent: Extent, memory: NDArray[np.uint8], before: NDArray[np.uint8] | None = None
    ) -> int:
        """Write `memory` to the spare slot; it counts from `commit` on. Returns the bytes that the file was given.

        before: what is committed of the weights of a split master, of which then only what changes may be written.
        Raises StorageFullError, StateError.
        """
        if not self._settled:
            self._settle()
        self._check_usable()
        self._spare_written = True
        return self._files[self.device_of(extent)].write(self.steps + 1, array, extent, memory, before)

    def commit(
        self,
        tensor_steps: Sequence[int],
        metadata: Mapping[str, Any] | None = None,
        extents: Iterable[Extent] | None = None,
        arrays: Sequence[str] | None = None,
    ) -> None:
        """Make what was written current, durably, with new `metadata` where that is given.

        extents, arrays: what this step changes, all unless given; the rest stays as it is.
        Raises StateError where one of these was not written, FormatError as `encode_metadata` does.
        """
        changed = self.manifest.extents if extents is None else tuple(extents)
        names = [array.name for array in self.manifest.arrays] if arrays is None else list(arrays)
        if missing := sum(file.missing(changed, names) for file in self._files):
            raise StateError(f"every extent must be written before a commit; {missing} are not")
        self._check_usable()
        stamp = Stamp(self.identity, self.profile, self.steps + 1, secrets.token_hex(8))
        self._commit(stamp, tensor_steps, self.metadata if metadata is None else metadata)

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

    def snapshot(self, folder: Path, *, replacing: bool = False) -> list[Path]:
        """Files of the committed step in a folder (made where it is missing), for `open`: reflinks or copies.

        An earlier snapshot of this state there is replaced when the new one is complete; replacing: whatever has the
        names. Writes may be in flight, but no commit. Raises StateError where another file has the name, another run's
        included, or this one is damaged, StorageFullError, changing nothing.
        """
        folder = Path(folder).absolute()
        with fill_folder(folder):
            return self._write_snapshot(folder, None if replacing else self.identity)

    def each(self, action: Callable[[StateFile], T]) -> list[T]:
        """Do something on every file, at once. Raises the first error, when all have ended."""
        if self._threads is None:
            return [action(file) for file in self._files]
        return map_all(self._threads, action, self._files)

    # Steps of a snapshot and of a commit

    def _write_snapshot(self, folder: Path, replaced: str | None) -> list[Path]:
        paths = snapshot_paths(self.paths, folder, replaced)
        beside = folder / f".nearflash-{secrets.token_hex(8)}"
        try:
            beside.mkdir(0o700)
            self.each(lambda file: copy(file, beside / paths[file.index].name))
            # Files under their *.partial names are completed by `open`, where only some get their own.
            for path in paths:
                give_name(beside / path.name, partial_of(path))
            for path in paths:
                give_name(partial_of(path), path)
        except OSError as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"{folder} cannot be written ({error.strerror}): choose another place") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return paths

    def _commit(self, stamp: Stamp, tensor_steps: Sequence[int], metadata: Mapping[str, Any]) -> None:
        if len(tensor_steps) != len(self.manifest.tensors):
            raise ShapeError(f"tensor_steps must be of {len(self.manifest.tensors)} tensors, not {len(tensor_steps)}")
        values = encode_metadata(metadata)
        self.each(lambda file: file.prepare(stamp, tensor_steps, values))
        self._poisoned = True  # A failed flush leaves unknown what the drives hold: only opening again can tell.
        self.each(StateFile.flush)
        self.each(StateFile.confirm)
        for file in self._files:
            file.adopt()
        self._poisoned = False
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
                f"{self.paths[0]}: a flush failed, or giving a file its name, so the drive's contents are unknown; "
                "close and open again"
            )
