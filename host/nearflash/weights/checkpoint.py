"""Checkpoints: the tensors of a file, or of a folder's files, by name; nothing is read before it is asked for.

    model.safetensors, or model-00001-of-00004.safetensors … and model.safetensors.index.json

Source: transformers' layout of sharded checkpoints.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from nearflash.abi.errors import WeightsError
from nearflash.support.files import write_durably
from nearflash.weights.file import WeightsTensor, read_file

__all__ = ["INDEX", "SINGLE", "is_compressed", "open_checkpoint", "write_index"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_checkpoint(path: Path | str) -> dict[str, WeightsTensor]:
    """The tensors of a safetensors file, or of a folder with one or with several and their index.

    Raises WeightsError where files are missing, damaged, of a newer version, or lack tensors that the index states.
    """
    path = Path(path)
    if path.is_file():
        return read_file(path)
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise WeightsError(f"{path} must be a safetensors file or a folder with {SINGLE} or {INDEX}")
        return read_file(path / SINGLE)
    places = _places(path / INDEX)
    files = {name: read_file(path / name) for name in sorted(set(places.values()))}
    for tensor, file in places.items():
        if tensor not in files[file]:
            raise WeightsError(f"{path / file}: tensor {tensor!r} must be there, as {INDEX} states")
    return {tensor: files[file][tensor] for tensor, file in places.items()}


def is_compressed(folder: Path) -> bool:
    """Whether a folder holds a checkpoint with compressed tensors. Raises as `open_checkpoint` does."""
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        return False
    return any(tensor.form != "dense" for tensor in open_checkpoint(folder).values())


def _places(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = {str(tensor): str(file) for tensor, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index} must be the index of a checkpoint ({error})") from error
    for file in places.values():
        if Path(file).name != file:
            raise WeightsError(f"{index} must name files of its own folder, not {file!r}")
    return places


def write_index(folder: Path, places: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of tensors that lie in several files, of `total_bytes` bytes in all."""
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(places)}, indent=2, sort_keys=True)
    write_durably(folder / INDEX, text + "\n")
