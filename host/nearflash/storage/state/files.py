"""The files of one state, seen as one: which belong together, who holds what, and reads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.io.direct import aligned_buffer
from nearflash.storage.state.file import StateFile
from nearflash.storage.state.manifest import Extent, Manifest
from nearflash.storage.state.superblock import Stamp

__all__ = ["StateSet", "in_order"]

T = TypeVar("T")


def in_order(files: Sequence[StateFile]) -> list[StateFile]:
    """The files of one state in the order of their deal, each at the last step that all of them have.

    Raises StateError, naming the file, where one is missing, there twice, of another state, dealt otherwise, of
    another history or too far behind. Changes nothing that is stored.
    """
    first = files[0]
    for file in files:
        if file.version.stamp.identity != first.version.stamp.identity:
            raise StateError(f"{file.path} belongs to another state than {first.path}; give the files of one")
        if (file.deal, file.manifest) != (first.deal, first.manifest):
            raise StateError(
                f"{file.path} must be dealt {first.deal.weights} as {first.path} is, not {file.deal.weights}; "
                "give the files of one resharding"
            )
    found = {file.index: file for file in files}
    for file in files:
        if found[file.index] is not file:
            raise StateError(f"{file.path} and {found[file.index].path} hold the same extents; give one of them")
    count = len(first.deal.weights)
    if missing := [str(index) for index in range(count) if index not in found]:
        raise StateError(
            f"the state of {first.path} has {count} files, not {len(files)}: give also number {', '.join(missing)} "
            "(counted from 0)"
        )
    _level([found[index] for index in range(count)])
    return [found[index] for index in range(count)]


def _level(files: Sequence[StateFile]) -> None:
    last = min(files, key=lambda file: file.version.stamp.step)
    step, versions = last.version.stamp.step, [file.version for file in files]
    for index, file in enumerate(files):
        if file.version.stamp.step > step + 1:
            raise StateError(
                f"{last.path} must be at the step of {file.path}, {file.version.stamp.step}, or one before it, not at "
                f"{step}; it is an old copy"
            )
        if file.version.stamp.step == step + 1:
            versions[index] = file.previous()
            if damage := file.verify(versions[index]):
                raise StateError(f"{last.path} is behind, and what {file.path} held before is gone: {damage[0]}")
        if versions[index].stamp != last.version.stamp:
            raise StateError(f"step {step} of {file.path} is of another history than that of {last.path}")
    for file, version in zip(files, versions, strict=True):
        if version is not file.version:
            file.step_back(version)


class StateSet:
    """Open files of one state, in order and at the same step. `read` may be called from many threads at once."""

    def __init__(self, files: Sequence[StateFile]) -> None:
        self._files = tuple(files)
        self._threads = ThreadPoolExecutor(len(files)) if len(files) > 1 else None

    def close(self) -> None:
        """Release files and locks; what was not committed is forgotten. It may be called twice."""
        if self._threads:
            self._threads.shutdown()
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What it is

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in the order of the deal."""
        return tuple(file.path for file in self._files)

    @property
    def manifest(self) -> Manifest:
        """Tensors, arrays and extents."""
        return self._files[0].manifest

    @property
    def weights(self) -> tuple[int, ...]:
        """How many extents each file gets in turn."""
        return self._files[0].deal.weights

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
    def extra(self) -> dict[str, Any]:
        """What was committed beside the arrays: JSON values."""
        return dict(self._files[0].version.extra)

    @property
    def stamp(self) -> Stamp:
        """Identity, profile, step and commit."""
        return self._files[0].version.stamp

    def device_of(self, extent: Extent) -> int:
        """Which of the files holds the extent."""
        return self._files[0].deal.file_of(extent)

    def extents_of(self, device: int) -> tuple[Extent, ...]:
        """The extents of one of the files, in order."""
        return self._files[device].layout.extents

    def read(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        """Fill `memory` (page aligned, `array.extent_bytes(extent)`) with what is committed. Raises StateError."""
        self._files[self.device_of(extent)].read(array, extent, memory)

    def verify(self) -> list[str]:
        """Read everything that is committed; one message for each damaged extent."""
        return [message for found in self.each(StateFile.verify) for message in found]

    def read_array(self, array: str) -> NDArray[Any]:
        """A whole committed array without the padding of its extents: fp32, else unsigned words. Raises StateError."""
        stored = self.manifest.array(array)
        parts = []
        for extent in self.manifest.extents:
            memory = aligned_buffer(stored.extent_bytes(extent))
            self.read(array, extent, memory)
            parts.append(memory[: stored.size_bytes(extent.params)])
        return np.concatenate(parts).view(np.float32 if stored.element_bytes == 4 else f"<u{stored.element_bytes}")

    def each(self, action: Callable[[StateFile], T]) -> list[T]:
        """Do something on every file, at once. Raises the first error, when all have ended."""
        if self._threads is None:
            return [action(file) for file in self._files]
        futures = [self._threads.submit(action, file) for file in self._files]
        wait(futures)
        return [future.result() for future in futures]
