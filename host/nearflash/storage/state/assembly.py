"""The files of one state: made together, and found again as one, in the order of their stripe and at one step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.io.backend import IoBackend
from nearflash.storage.io.direct import partial_of
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.storage.state.manifest import Extent, Manifest
from nearflash.storage.state.state_file import StateFile
from nearflash.storage.state.stripe import Stripe
from nearflash.support.files import refuse_link

__all__ = ["Fill", "create_files", "discard_files", "fill_files", "open_files", "publish_files"]

Fill = Callable[[str, Extent, NDArray[np.uint8]], None]
"""Gives the bytes of an extent of an array: `fill(array, extent, memory)`, memory being zero before."""


def create_files(
    paths: Sequence[Path],
    manifest: Manifest,
    stripe: Stripe,
    *,
    direct: bool,
    backend: IoBackend | None,
    replacing: bool = False,
) -> list[StateFile]:
    """New files without a committed step, named *.partial until `publish_files`.

    replacing: the paths are those of a state that they take the place of. Raises StateError where a path exists
    otherwise, or is given twice, StorageFullError (nothing is left then).
    """
    for path in paths:
        if not path.exists():
            refuse_link(path, "a free name", StateError)
        if (path.exists() and not replacing) or paths.count(path) > 1:
            raise StateError(f"{path} must not exist yet and be given once; open it, or choose another path")
    files: list[StateFile] = []
    try:
        for index, path in enumerate(paths):
            files.append(StateFile.create(path, manifest, stripe, index, direct=direct, backend=backend))
    except BaseException:
        discard_files(files)
        raise
    return files


def fill_files(files: Sequence[StateFile], step: int, fill: Fill) -> None:
    """Write every extent of every array into the slot of `step`."""
    manifest, stripe = files[0].manifest, files[0].stripe
    for extent in manifest.extents:
        for array in manifest.arrays:
            memory = reuse_buffer(array.extent_bytes(extent))
            memory[:] = 0
            fill(array.name, extent, memory)
            files[stripe.file_of(extent)].write(step, array.name, extent, memory)


def publish_files(files: Sequence[StateFile], paths: Sequence[Path], *, replacing: bool = False) -> None:
    """Give each file its name, durably, where it does not have it yet; in the place of another one's if `replacing`."""
    for file, path in zip(files, paths, strict=True):
        if file.path != path:
            (file.replace if replacing else file.publish)(path)


def discard_files(files: Sequence[StateFile]) -> None:
    """Remove and close files of a creation that failed."""
    for file in files:
        file.path.unlink(missing_ok=True)
        file.close()


def open_files(paths: Sequence[Path], **options: Any) -> list[StateFile]:
    """Existing files of one state, in the order of its stripe, at the last step that all have; `options` are
    StateFile.open's. Raises StateError.

    Where a creation, or the replacement of a state, was cut short while it gave the files their names, the rest of them
    get theirs.
    """
    begun = any(path.exists() for path in paths)
    named = [partial_of(path) if begun and not path.exists() and partial_of(path).exists() else path for path in paths]
    replacing = False
    try:
        files, ordered = _open(named, **options)
    except StateError:
        # Files get their names when all are complete: one without a partial beside it has its name already.
        named, before = [partial_of(path) if partial_of(path).exists() else path for path in paths], named
        if named == before or not any(path in paths for path in named):
            raise
        files, ordered = _open(named, at_one_commit=True, **options)
        replacing = True
    try:
        publish_files(files, paths, replacing=replacing)
    except BaseException:
        _close(files)
        raise
    return ordered


def _open(
    paths: Sequence[Path], *, at_one_commit: bool = False, **options: Any
) -> tuple[list[StateFile], list[StateFile]]:
    """The files as given, and in stripe order. Raises StateError where they are not of one state."""
    files: list[StateFile] = []
    try:
        for path in paths:
            files.append(StateFile.open(path, **options))
        if at_one_commit and len({file.version.stamp for file in files}) > 1:
            raise StateError(f"{paths[0]} and the files beside it must be of one commit; give the files of one state")
        return files, _in_order(files)
    except BaseException:
        _close(files)
        raise


def _close(files: Sequence[StateFile]) -> None:
    for file in files:
        file.close()


def _in_order(files: Sequence[StateFile]) -> list[StateFile]:
    """The files of one state in stripe order, each at the last step that all of them have.

    Raises StateError, naming the file, where one is missing, given twice, of another state, of another stripe or
    history, or more than a step older. Changes nothing that is stored.
    """
    first = files[0]
    for file in files:
        if file.version.stamp.identity != first.version.stamp.identity:
            raise StateError(f"{file.path} belongs to another state than {first.path}; give the files of one")
        if (file.stripe, file.manifest) != (first.stripe, first.manifest):
            raise StateError(
                f"{file.path} must be striped {first.stripe.ratio} as {first.path} is, not {file.stripe.ratio}; "
                "give the files of one resharding"
            )
    by_index = {file.index: file for file in files}
    for file in files:
        if by_index[file.index] is not file:
            raise StateError(f"{file.path} and {by_index[file.index].path} hold the same extents; give one of them")
    count = len(first.stripe.ratio)
    if missing := [str(index) for index in range(count) if index not in by_index]:
        raise StateError(
            f"the state of {first.path} has {count} files, not {len(files)}: give also number {', '.join(missing)} "
            "(counted from 0)"
        )
    _level([by_index[index] for index in range(count)])
    return [by_index[index] for index in range(count)]


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
                raise StateError(f"{last.path} is one step older, and that step of {file.path} is gone: {damage[0]}")
        if versions[index].stamp != last.version.stamp:
            raise StateError(f"step {step} of {file.path} is of another history than that of {last.path}")
    for file, version in zip(files, versions, strict=True):
        if version is not file.version:
            file.step_back(version)
