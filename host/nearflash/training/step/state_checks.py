"""Whether a stored state is the one that an optimizer may go on from, and its disk has room for another."""

import shutil
import warnings

from nearflash.abi.errors import StateError, StorageFullError, UnmarkedStateWarning
from nearflash.storage import Manifest, StateStore
from nearflash.storage.state.delta_log import RESERVED
from nearflash.storage.state.layout import StateLayout

__all__ = ["check_mark", "check_room", "mark_of"]

_OPTIMIZER = "optimizer"
"""Key, under RESERVED, of the optimizer that a state was made by: others may store the same arrays."""


def mark_of(optimizer: str) -> dict[str, str]:
    """Make what states of an optimizer hold under RESERVED; an empty name has no mark, and is compared with none."""
    return {_OPTIMIZER: optimizer} if optimizer else {}


def check_mark(store: StateStore, mark: dict[str, str]) -> None:
    """Raise StateError for the state of another optimizer.

    States of version 0.3, and imports, have no mark, and optimizers that store the same arrays leave the same in them:
    one with moments is taken as this optimizer's, with an UnmarkedStateWarning.
    """
    stored = mark_of(store.metadata.get(RESERVED, {}).get(_OPTIMIZER, ""))
    if mark and stored and stored != mark:
        raise StateError(
            f"optimizer must be {stored[_OPTIMIZER]!r}, which made the state of {store.paths[0]}, not "
            f"{mark[_OPTIMIZER]!r}: take that one or another path, or hand the moments over by full_state_dict() and "
            "load_full_state_dict()"
        )
    if mark and not stored and store.steps and len(store.manifest.arrays) > 1:
        warnings.warn(
            f"{store.paths[0]} has no mark of the optimizer that made it, as those of version 0.3 and imports: "
            f"{mark[_OPTIMIZER]!r} is taken for it, and marks it with the next step",
            UnmarkedStateWarning,
            stacklevel=2,
        )


def check_room(store: StateStore, manifest: Manifest) -> None:
    """Raise StorageFullError where a state of `manifest` does not fit, in the place of the store's files."""
    ratio, size_bytes = store.stripe_ratio, StateLayout(manifest, 0, manifest.extents).extents_bytes
    for path, part in zip(store.paths, ratio, strict=True):
        need = size_bytes * part // sum(ratio)
        free_bytes = shutil.disk_usage(path.parent).free + path.stat().st_size
        if path.is_file() and free_bytes < need:
            raise StorageFullError(
                f"{path} must have room for {need} bytes, not {free_bytes}, to begin again with these tensors; "
                "free it, or construct a new optimizer on another disk"
            )
