"""A state beside a framework's checkpoint: a snapshot when it saves, which replaces the state before a resume.

The framework's own checkpoint holds a handle to the state (its identity and step), not the state. Without a snapshot
training resumes from the state file at the last committed step only, which is where it stopped, not where it saved.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from nearflash.abi.errors import StateError
from nearflash.storage import StateStore
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.state.snapshot import copy
from nearflash.training.optimizers.options import Settings

__all__ = ["FOLDER", "restore"]

FOLDER = "nearflash"
"""Of the snapshot, in the folder of a checkpoint."""


def restore(
    checkpoint: str | Path, path: str | Path | Sequence[str | Path], *, devices: int = 1, direct: bool = True
) -> int:
    """Put a checkpoint's snapshot in the place of the state on `path`, as an optimizer takes it; returns its step.

    The files that were there are replaced. Raises StateError where there is no complete snapshot, or one of another
    number of files, or where an optimizer has those files open; StorageFullError.
    """
    folder = Path(checkpoint) / FOLDER
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    targets = Settings(path=path, device=["host"] * devices).paths
    if len(found) != len(targets):
        raise StateError(
            f"{folder} must hold a snapshot of {len(targets)} files, not of {len(found)}; see integrations.trainer"
        )
    with contextlib.ExitStack() as held:
        for target in filter(Path.exists, targets):
            held.enter_context(DirectFile.open(target, direct=direct))  # locked: no optimizer trains on it
        store = held.enter_context(StateStore.open(found, direct=direct))
        store.each(lambda file: copy(file, targets[file.index]))
        return store.steps
