"""The block store of an engine's tier: its file in a folder, named by what makes KV incompatible."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.blocks import BlockStore

__all__ = ["TierSettings", "model_files", "open_tier_store"]

_NAME_CHARACTERS = 200
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierSettings:
    """A user's part of an engine's configuration."""

    path: str | Sequence[str]
    """A folder, or several on drives of their own."""
    capacity_bytes: int
    """Of the files that are opened, which have them from the start."""
    deadline_s: float = 10.0
    """After which a transfer has failed."""
    namespace: str = ""
    """A text that must be equal, as a model's revision where its name stays the same."""
    weights: Sequence[float] | None = None
    """The folders' shares."""
    in_flight_bytes: int = 1 << 30
    direct: bool = True
    """False: through the page cache, for file systems without O_DIRECT."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Settings from an engine's configuration; others are named in the log. Raises CommandError."""
        known = {one.name for one in fields(cls)}
        if unknown := sorted(given.keys() - known):
            _log.warning("nearflash knows no %s: ignored", ", ".join(unknown))
        if missing := sorted({"path", "capacity_bytes"} - given.keys()):
            raise CommandError(f"the configuration must have {' and '.join(missing)}")
        return cls(**{name: value for name, value in given.items() if name in known})

    def open(self, block_bytes: int, model: str, facts: Mapping[str, Any], share: float = 1.0) -> BlockStore:
        """See `open_tier_store`; share: of the capacity."""
        capacity = int(self.capacity_bytes * share) if type(self.capacity_bytes) is int else self.capacity_bytes
        return open_tier_store(
            self.path, capacity, block_bytes, model, {"namespace": self.namespace, **facts},
            weights=self.weights, in_flight_bytes=self.in_flight_bytes, direct=self.direct,
        )  # fmt: skip


def open_tier_store(
    path: str | Sequence[str], capacity_bytes: int, block_bytes: int, model: str, fields: Mapping[str, Any],
    **options: Any,
) -> BlockStore:  # fmt: skip
    """The store in the folder `path` (or several, on drives of their own), which is made where it is missing.

    fields: all that makes KV incompatible, as JSON values: of other fields the file is another one, so that models
    share a folder. `options` are BlockStore's. Raises CommandError, StateError.
    """
    folders = [Path(path)] if isinstance(path, str) else [Path(one) for one in path]
    if type(capacity_bytes) is not int:
        raise CommandError(f"capacity_bytes must be a whole number, not {capacity_bytes!r}")
    digest = sha256(json.dumps(dict(fields), sort_keys=True).encode()).hexdigest()
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StateError(f"{folder} must be a folder for blocks ({error.strerror}): give another path") from error
    files = [folder / f"{digest[:32]}.blocks" for folder in folders]
    return BlockStore(files, capacity_bytes, block_bytes, f"{model[:_NAME_CHARACTERS]} {digest}", **options)


def model_files(model: str) -> list[list[Any]]:
    """Names, lengths and times of a local model's files: a model that is trained on under its name is another one."""
    folder = Path(model)
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
