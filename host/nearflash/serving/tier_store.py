"""The block store of an engine's tier: its file in a folder, named by what makes KV incompatible."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.blocks import BlockStore

__all__ = ["model_files", "open_tier_store"]

_NAME_CHARACTERS = 200


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
