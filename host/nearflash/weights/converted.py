"""Folders that a GGUF file was converted to: kept in the user's cache, by the file's digest.

transformers takes 20 seconds of processor time to read SmolLM2 from its GGUF file each time, most of them for the names
and pieces of its vocabulary; from a folder of safetensors and tokenizer.json it takes one.

    ~/.cache/nearflash/models/SmolLM2-135M-Instruct.Q4_1-0123456789abcdef/: config.json, …, files.json

files.json has the CRC32C of each file and is written last: a folder without it, or with files that differ, was cut off
or damaged, and is converted again.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import transformers

from nearflash.storage.io.checksum import crc32c
from nearflash.support.files import flush_folder, open_regular, read_text, write_durably
from nearflash.support.folders import private_folder, user_folder
from nearflash.weights.folder import CONFIG, ModelFolder, read_config

__all__ = ["keep_converted"]

_FILES = "files.json"


def keep_converted(folder: ModelFolder, convert: Callable[[Path], None]) -> ModelFolder:
    """The folder that `folder`'s GGUF file was converted to; `convert` fills an empty one where there is none yet.

    Raises OSError where the cache cannot be written, or others can write to it.
    """
    file = folder.path / str(folder.gguf)
    with os.fdopen(open_regular(file), "rb") as content:
        digest = hashlib.file_digest(content, "sha256")
    digest.update(transformers.__version__.encode())
    models = private_folder(user_folder("XDG_CACHE_HOME") / "models")
    kept = models / f"{file.stem}-{digest.hexdigest()[:16]}"
    if not _is_intact(kept):
        work = models / f".{kept.name}.{secrets.token_hex(8)}.partial"
        work.mkdir(0o700)
        try:
            convert(work)
            _seal(work)
            shutil.rmtree(kept, ignore_errors=True)
            if not kept.exists():  # else another process was faster
                work.rename(kept)
                flush_folder(models)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return ModelFolder(kept, read_config(kept / CONFIG))


def _is_intact(folder: Path) -> bool:
    try:
        stated = json.loads(read_text(folder / _FILES))
        return bool(stated) and stated == _checksums(folder)
    except (OSError, ValueError):
        return False


def _seal(folder: Path) -> None:
    """Flush a folder's files, then write their checksums beside them."""
    for path in folder.iterdir():
        path.chmod(0o600)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    write_durably(folder / _FILES, json.dumps(_checksums(folder), indent=1))


def _checksums(folder: Path) -> dict[str, int]:
    """CRC32C of each file by name."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != _FILES and path.stat().st_size:
            found[path.name] = crc32c(np.memmap(path, dtype=np.uint8, mode="r"))
    return found
