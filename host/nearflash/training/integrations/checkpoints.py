"""A state beside a framework's checkpoint: a snapshot when it saves, which replaces the state before a resume.

The framework's own checkpoint holds a handle to the state (its identity and step), not the state. Without a snapshot
training resumes from the state file at the last committed step only, which is where it stopped, not where it saved.
"""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nearflash.abi.errors import StateError
from nearflash.storage import StateStore
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.state.snapshot import copy
from nearflash.support.files import give_name
from nearflash.training.step.settings import StepSettings

__all__ = ["FOLDER", "files_of", "restore", "save"]

FOLDER = "nearflash"
"""Of the snapshot, in the folder of a checkpoint; those of several ranks are `nearflash-rank0` and so on."""


def save(optimizer: Any, checkpoint: str | Path) -> list[Path]:
    """Put a snapshot of the optimizer's state into the folder of a checkpoint; one that is there is replaced.

    optimizer: a near-storage one, or a RankedOptimizer, of which each rank saves its share. Each file is replaced at
    once when all new ones are complete. Raises StateError, StorageFullError, with the earlier snapshot as it was.
    """
    share = getattr(optimizer, "share", None)
    folder = Path(checkpoint).absolute() / _name(None if share is None or share.of == 1 else share.rank)
    paths: list[Path] = optimizer.store.snapshot(folder, replacing=True)
    for path in {*files_of(folder)} - {*paths}:  # of an earlier state on more files
        path.unlink()
    return paths


def restore(
    checkpoint: str | Path,
    path: str | Path | Sequence[str | Path],
    *,
    devices: int = 1,
    direct: bool = True,
    rank: int | None = None,
) -> int:
    """Put a checkpoint's snapshot in the place of the state on `path`, as an optimizer takes it; returns its step.

    The files that were there are replaced. rank: whose of several ranks' snapshots. Raises StateError where there is no
    complete snapshot, or one of another number of files, or where an optimizer has those files open; StorageFullError.
    """
    folder = Path(checkpoint) / _name(rank)
    files = files_of(folder)
    targets = StepSettings(path=path, device=["host"] * devices).paths
    if len(files) != len(targets):
        others = sorted(other.name for other in Path(checkpoint).glob(f"{FOLDER}*") if other != folder)
        hint = f"there are {', '.join(others)}, of another number of ranks" if others else "see integrations.trainer"
        raise StateError(f"{folder} must hold a snapshot of {len(targets)} files, not of {len(files)}; {hint}")
    if missing := [target.parent for target in targets if not target.parent.is_dir()]:
        raise StateError(f"{missing[0]} must be a folder that exists, for the state to be restored to; make it")
    with contextlib.ExitStack() as held:
        for target in filter(Path.exists, targets):
            held.enter_context(DirectFile.open(target, direct=direct))  # locked: no optimizer trains on it
        store = held.enter_context(StateStore.open(files, direct=direct))
        partial = [target.with_name(f".nearflash-{secrets.token_hex(8)}.partial") for target in targets]
        try:
            store.each(lambda file: copy(file, partial[file.index]))
            for copied, target in zip(partial, targets, strict=True):
                give_name(copied, target)
        finally:
            for copied in partial:
                copied.unlink(missing_ok=True)
        return store.steps


def files_of(folder: Path) -> list[Path]:
    """The files of a snapshot, in order; none where there is no such folder."""
    return sorted(_visible(folder)) if folder.is_dir() else []


def _visible(folder: Path) -> Iterator[Path]:
    names = (path for path in folder.iterdir() if not path.name.startswith(".") and path.suffix != ".partial")
    return (path for path in names if path.is_file())


def _name(rank: int | None) -> str:
    return FOLDER if rank is None else f"{FOLDER}-rank{rank}"
