"""Checkpoints: the tensors of a file, or of a folder's files, by name; nothing is read before it is asked for.

    model.safetensors, or model-00001-of-00004.safetensors … and model.safetensors.index.json

Source: transformers' layout of sharded checkpoints.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from nearflash.abi.errors import WeightsError
from nearflash.support.files import read_text, write_durably
from nearflash.weights.file import CHECKPOINT, WeightsTensor, read_checkpoint_file, read_file
from nearflash.weights.parts import check_parts

__all__ = ["INDEX", "SINGLE", "is_compressed", "open_checkpoint", "write_index"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_checkpoint(path: Path | str) -> dict[str, WeightsTensor]:
    """The tensors of a safetensors file, or of a folder with one or with several and their index.

    Raises WeightsError where files are missing, damaged, of a newer version, or lack tensors that the index states, and
    where a compressed folder's parts do not belong together (`check_parts`).
    """
    path = Path(path)
    check_parts(path)
    if path.is_file():
        return read_file(path)
    if (path / SINGLE).is_file() or not (path / INDEX).is_file():  # as transformers: an index may be of older shards
        if not (path / SINGLE).is_file():
            raise WeightsError(f"{path} must be a safetensors file or a folder with {SINGLE} or {INDEX}")
        return read_file(path / SINGLE)
    places, stated = _places(path / INDEX)
    files, checkpoints = {}, {}
    for name in sorted(set(places.values())):
        if not (path / name).exists():
            raise WeightsError(f"{path / name} must be there, as {INDEX} states: copy the whole folder again")
        files[name], checkpoints[name] = read_checkpoint_file(path / name)
    for tensor, file in places.items():
        if tensor not in files[file]:
            raise WeightsError(f"{path / file}: tensor {tensor!r} must be there, as {INDEX} states")
    wanted = stated or next(iter(checkpoints.values()), "")
    for name, checkpoint in checkpoints.items():
        if checkpoint != wanted:
            raise WeightsError(
                f"{path / name} must be of the checkpoint {wanted or 'without a name'!r}, as {INDEX} or another file "
                f"states, not of {checkpoint or 'one without a name'!r}: copy the whole folder again"
            )
    return {tensor: files[file][tensor] for tensor, file in places.items()}


def is_compressed(folder: Path) -> bool:
    """Whether a folder holds a checkpoint with compressed tensors. Raises as `open_checkpoint` does."""
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        return False
    return any(tensor.form != "dense" for tensor in open_checkpoint(folder).values())


def _places(index: Path) -> tuple[dict[str, str], str]:
    """The file of each tensor, and what the index states of its checkpoint, if anything."""
    try:
        body = json.loads(read_text(index))
        places = {str(tensor): str(file) for tensor, file in body["weight_map"].items()}
        stated = str((body.get("metadata") or {}).get(CHECKPOINT, ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index} must be the index of a checkpoint ({error})") from error
    for file in places.values():
        if Path(file).name != file:
            raise WeightsError(f"{index} must name files of its own folder, not {file!r}")
    return places, stated


def write_index(folder: Path, places: Mapping[str, str], total_bytes: int, checkpoint: str = "") -> None:
    """Write the index of tensors that lie in several files of one checkpoint, of `total_bytes` bytes in all.

    checkpoint: what the files state, so that another one's are told. Raises OSError.
    """
    metadata = {"total_size": total_bytes, **({CHECKPOINT: checkpoint} if checkpoint else {})}
    text = json.dumps({"metadata": metadata, "weight_map": dict(places)}, indent=2, sort_keys=True)
    write_durably(folder / INDEX, text + "\n")
