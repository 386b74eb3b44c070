"""`optimizer.store`: what may be asked of an optimizer's state while the optimizer holds its files open."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.abi.optimizers import Profile
from nearflash.storage import Manifest, StateStore
from nearflash.storage.state.exchange import export_state
from nearflash.storage.state.status import StateStatus

__all__ = ["OptimizerStore", "snapshot_files"]


def snapshot_files(snapshot: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files of a snapshot: those given, or all in the folder given. Raises StateError where there is none."""
    if not isinstance(snapshot, str | Path):
        if isinstance(snapshot, list | tuple) and snapshot and all(isinstance(path, str | Path) for path in snapshot):
            return [Path(path) for path in snapshot]
        raise StateError(f"snapshot must be a folder, or the files of one, not {snapshot!r}: give what snapshot gave")
    try:
        snapshots = sorted(Path(snapshot).iterdir()) if Path(snapshot).is_dir() else [Path(snapshot)]
    except (OSError, ValueError) as error:
        raise StateError(f"{snapshot} cannot be a snapshot ({error}): give its folder") from error
    if files := [path for path in snapshots if path.suffix != ".partial"]:
        return files
    raise StateError(f"{snapshot} must hold the files of a snapshot, not nothing: give the folder of store.snapshot")


class OptimizerStore:
    """The state on flash as of the last committed step: read, verified, copied; only the optimizer's step changes it.

    None of its calls may run while a step does.
    """

    def __init__(self, store: Callable[[], StateStore], paths: tuple[Path, ...]) -> None:
        """store: the open store now; it is another one after `add_param_group`, `restore`. paths: its files."""
        self._store = store
        self.paths = paths
        """The state files, by device."""

    @property
    def path(self) -> Path:
        """The (first) state file."""
        return self.paths[0]

    @property
    def identity(self) -> str:
        """16 hexadecimal digits drawn at creation: tells this state and its copies from all others."""
        return self._store().identity

    @property
    def profile(self) -> Profile:
        """Operation order of the update."""
        return Profile(self._store().profile)

    @property
    def manifest(self) -> Manifest:
        """Places of the tensors in the stored arrays."""
        return self._store().manifest

    @property
    def tensor_steps(self) -> tuple[int, ...]:
        """Updates of each tensor, in the manifest's order."""
        return self._store().tensor_steps

    def status(self) -> StateStatus:
        """Step, tensors, arrays, files and metadata; reads no extent."""
        return StateStatus.of(self._store())

    def verify(self) -> list[str]:
        """Read the whole state; one message for each damaged extent."""
        return self._store().verify()

    def snapshot(self, folder: str | Path, *, replacing: bool = False) -> list[Path]:
        """Files of the last committed step in a folder, which open like these. Raises as StateStore.snapshot."""
        return self._store().snapshot(Path(folder), replacing=replacing)

    def export(self, path: str | Path) -> int:
        """Write the state to a new safetensors file; returns its bytes. Raises StateError, StorageFullError."""
        return export_state(self._store(), Path(path))

    def read_array(self, array: str) -> NDArray[Any]:
        """A stored array: fp32 (p, and the moments in fp32) or unsigned words; the flat vector, padding included."""
        return self._store().read_array(array)
