"""The parts of a compressed model's folder bound to each other: configuration, tokenizer, index, weights and report.

`nearflash compress` gives its weights' files and its report one name, drawn at random; the report has the digest of
each part beside the weights. A file that was replaced, taken away or added since, or a report or weights of another
compression, is found before anything is loaded. What may be edited on purpose is no part: settings of generation,
adapters, plans, and what people read.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nearflash.abi.errors import StateError, WeightsError
from nearflash.storage.state.safetensors import TensorFile
from nearflash.support.files import open_regular, read_text

__all__ = ["REPORT", "REPORT_NAME", "check_parts", "part_digests"]

REPORT = "compression.json"
"""The report's name in the folder."""
REPORT_NAME = "nearflash_report"
"""Key of the weights' metadata, and of the report: what both state alike."""
_PARTS = "parts"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_NO_PARTS = ("generation_config.json", REPORT)
_NO_PARTS_BEGIN = (".", "nearflash-", "adapter_", "README", "LICENSE", "NOTICE")
_READ = (".json", ".jinja", ".model", ".py")
"""Of files that transformers would read if they were added."""


def part_digests(folder: Path) -> dict[str, str]:
    """SHA-256, hexadecimal, of each part of a folder beside its weights, by the file's name. Raises WeightsError."""
    return {path.name: _digest(path) for path in _parts(folder)}


def check_parts(folder: Path) -> None:
    """Raise WeightsError, naming the file, where a compressed folder's parts do not belong together.

    Nothing for a folder that `nearflash compress` did not write.
    """
    names = {path: _report_name(path) for path in sorted(folder.glob("model*.safetensors"))}
    has_report = (folder / REPORT).is_file()
    if not any(names.values()) and not has_report:
        return
    report = _report(folder / REPORT)
    wanted = report.get(REPORT_NAME)
    if wanted is None and not any(names.values()):
        return  # of a version that bound no parts
    for path, name in names.items():
        if name != wanted:
            raise _error(path, f"{REPORT} is the report of other ones")
    stated, digests = report.get(_PARTS), part_digests(folder)
    if not isinstance(stated, dict):
        raise _error(folder / REPORT, "it does not state the parts of the folder")
    for name in sorted({*stated, *digests}):
        if name not in digests:
            raise _error(folder / name, "it is missing")
        if name in stated and stated[name] != digests[name]:
            raise _error(folder / name, "it was replaced or edited since")
        if name not in stated and name.endswith(_READ):
            raise _error(folder / name, "it was added since")


def _parts(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        named = not path.name.startswith(_NO_PARTS_BEGIN) and path.name not in _NO_PARTS
        if named and path.suffix not in (*_WEIGHTS, ".md") and path.is_file():
            yield path


def _digest(path: Path) -> str:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _error(path, f"reading failed ({error.strerror})") from error


def _report_name(path: Path) -> str | None:
    try:
        return TensorFile(path).metadata.get(REPORT_NAME)
    except StateError:
        return None  # whoever opens it states what is wrong


def _report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(path, f"it cannot be read ({error})") from error
    if not isinstance(report, dict):
        raise _error(path, "it is no object")
    return report


def _error(path: Path, what: str) -> WeightsError:
    rule = "must belong to the files beside it"
    return WeightsError(f"{path} {rule}, but {what}: put it back as nearflash compress wrote it, or compress again")
