"""Copies of a state at its committed step, which open like any other.

A file system with reflinks (xfs, btrfs) shares the blocks: nothing is copied until one side writes. Elsewhere each
extent of the committed slot is read, checked and written again, so that damage is not copied.

Source: ioctl_ficlone(2).
"""

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nearflash.abi.errors import StateError
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile, aligned_buffer, flush_directory
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.storage.io.sealed import is_sealed
from nearflash.storage.state.state_file import StateFile
from nearflash.storage.state.superblock import last_and_previous
from nearflash.support.files import replace_file

__all__ = ["copy", "fill_folder", "make_folder", "reflink", "snapshot_paths"]

FICLONE = 0x40049409
"""From linux/fs.h: _IOW(0x94, 9, int)."""


def make_folder(folder: Path) -> list[Path]:
    """Make a folder, and those that it lies in, durably. Returns those that were missing, innermost first. Raises
    StateError.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"{folder} cannot be a folder ({error.strerror}): choose another place") from error
    for parent in reversed(missing):
        flush_directory(parent.parent)
    return missing


@contextmanager
def fill_folder(folder: Path) -> Iterator[None]:
    """Make a folder as `make_folder` for what the block puts there; where it raises, those that were missing go again
    if nothing is in them.
    """
    made = make_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in made:
                each.rmdir()
        raise


def snapshot_paths(paths: Sequence[Path], folder: Path, identity: str | None) -> list[Path]:
    """Names in the folder for copies of the files: their own, with a number where two are alike.

    Raises StateError where one exists that is no earlier snapshot of the state of this identity (None: of any): another
    file, one of another run, or one that is in use.
    """
    alike = Counter(path.name for path in paths)
    names = [path.name if alike[path.name] == 1 else f"{path.name}.{index}" for index, path in enumerate(paths)]
    for name in names:
        if identity and os.path.lexists(folder / name) and not _is_of(identity, folder / name):
            raise StateError(
                f"{folder / name} must be an earlier snapshot of this state, or not exist yet; choose another folder"
            )
    return [folder / name for name in names]


def _is_of(identity: str, path: Path) -> bool:
    """Whether it is a file of that state. Raises StateError for one that an optimizer has open."""
    if not path.is_file() or path.is_symlink():
        return False
    with DirectFile.open(path, direct=False) as file:
        if file.size_bytes < 2 * BLOCK_BYTES:
            return False
        blocks = [aligned_buffer(BLOCK_BYTES), aligned_buffer(BLOCK_BYTES)]
        for number, block in enumerate(blocks):
            file.read(number * BLOCK_BYTES, block)
    return any(map(is_sealed, blocks)) and last_and_previous(path, blocks)[0].stamp.identity == identity


def copy(file: StateFile, path: Path) -> bool:
    """A copy of the file at the step that its reads see, durable, complete as soon as it has its name.

    Returns whether blocks are shared. Raises StateError for damage, StorageFullError; nothing is left then.
    """
    if file.has_its_name() and reflink(file.path, path):
        return True
    _copy(file, path)
    return False


def reflink(source: Path, path: Path) -> bool:
    """A new, durable file that shares all blocks of `source`; False, and no file, where the file system has no such.

    Raises StateError where the name is taken.
    """
    try:
        with source.open("rb") as original, replace_file(path, keep_existing=True) as file:
            fcntl.ioctl(file.fileno(), FICLONE, original.fileno())
    except FileExistsError as error:
        raise StateError(f"{path} must not exist yet: choose another folder for the snapshot") from error
    except OSError:
        return False
    return True


def _copy(file: StateFile, path: Path) -> None:
    version = file.version
    new = StateFile.create(path, file.manifest, file.stripe, file.index, direct=file.direct)
    try:
        for extent in file.layout.extents:
            for array in file.manifest.stored:
                memory = reuse_buffer(array.extent_bytes(extent))
                file.read(array.name, extent, memory)
                new.write(version.stamp.step, array.name, extent, memory)
        new.prepare(version.stamp, version.tensor_steps, version.metadata)
        new.flush()
        new.confirm()
        new.publish(path)
    except BaseException:
        new.path.unlink(missing_ok=True)
        raise
    finally:
        new.close()
