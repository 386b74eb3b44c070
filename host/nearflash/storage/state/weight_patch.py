"""Sparse weight patches for serving engines: one file a version, with a manifest that binds it to the version before.

    version-00000012.safetensors   `NAME.indices` I32 (n,), flat into the checkpoint's tensor, ascending;
                                   `NAME.values` (n,) in the tensor's dtype; tensors that changed nowhere have none
    version-00000012.json          versions, the file's SHA-256 and size, and of every tensor its shape, dtype and
                                   fingerprint before and after

The manifest comes last, and a version without one is none: who publishes may be killed at any time. A patch holds new
values and no differences, so that it may be applied twice.

Source: vLLM's CheckpointWeightPatch (docs.vllm.ai, model_loader/checkpoint_weight_patch: name, shape, dtype, values,
flat indices); TRL's delta weight sync (huggingface.co/blog/delta-weight-sync: a sparse safetensors file a version);
prime-rl pull request 2823 (a patch names its base step, which the receiver compares).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.abi.python310 import Self
from nearflash.device.backends.host.delta import Changes
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.state.delta_log import TensorMark, WeightDelta
from nearflash.storage.state.fingerprint import fingerprint_bytes
from nearflash.storage.state.safetensors import ITEM_BYTES, StoredTensor, TensorFile, write_tensors
from nearflash.storage.state.snapshot import fill_folder
from nearflash.support.files import read_text, write_durably
from nearflash.support.tables import check_fields

__all__ = ["WeightPatch", "apply_patch", "newest_version", "patch_checkpoint", "publish_patch"]

_FORMATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_MANIFEST = re.compile(r"version-(\d{8,})\.json")
_INDICES, _VALUES, _FORMAT = "indices", "values", 1


@dataclass(frozen=True, eq=False)
class WeightPatch:
    """A published version: its manifest, and its file."""

    base_version: int
    version: int
    tensors: tuple[TensorMark, ...]
    path: Path
    size_bytes: int
    sha256: str

    @classmethod
    def open(cls, folder: Path, version: int) -> Self:
        """A version of a folder, whose file was read through. Raises StateError where it is none, or damaged."""
        manifest, path = _names(folder, version)
        if not manifest.exists():
            raise StateError(
                f"{folder} must have version {version}, but {manifest.name} is not there; its newest is "
                f"{newest_version(folder)}"
            )
        try:
            about: dict[str, Any] = json.loads(read_text(manifest))
            kinds: dict[str, type] = dict.fromkeys(("format", "base_version", "version", "size_bytes"), int)
            kinds |= dict.fromkeys(("sha256", "identity", "file"), str)
            check_fields(str(manifest), about, tensors=list, **kinds)
            marks = tuple(TensorMark.from_json(*mark) for mark in about["tensors"])
            if (about["format"], about["version"]) != (_FORMAT, version):
                raise ValueError(f"format {about['format']} and version {about['version']}")
            if (size := path.stat().st_size) != about["size_bytes"] or (found := _digest(path)) != about["sha256"]:
                raise ValueError(f"{path.name} of {size} bytes is another file than the manifest states")
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"{manifest} must be a published version ({error}); publish it again") from error
        return cls(about["base_version"], version, marks, path, size, found)

    def changes(self) -> Iterator[tuple[TensorMark, Changes]]:
        """Each tensor with its flat indices and new words, none where it did not change. Raises StateError."""
        file = TensorFile(self.path)
        for mark in self.tensors:
            dtype = f"<u{ITEM_BYTES[_FORMATS[mark.dtype]]}"
            if f"{mark.name}.{_INDICES}" not in file.tensors:
                yield mark, Changes(np.empty(0, np.int64), np.empty(0, dtype))
                continue
            indices = _read(file, f"{mark.name}.{_INDICES}").view("<i4").astype(np.int64)
            yield mark, Changes(indices, _read(file, f"{mark.name}.{_VALUES}").view(dtype))


def publish_patch(delta: WeightDelta, folder: Path) -> WeightPatch:
    """Write a delta as the version of its step, from the version of the step that it begins at.

    Raises StateError where the folder has that version, where its newest is not that base with the same weights, or for
    a tensor of 2^31 elements and more; StorageFullError. No half version is left.
    """
    with fill_folder(folder):
        return _publish(delta, folder)


def _publish(delta: WeightDelta, folder: Path) -> WeightPatch:
    manifest, path = _names(folder, delta.step)
    if not delta.tensors:
        raise StateError(
            f"a version must have steps behind its base, not be version {delta.since} again, which {folder} begins at "
            "or has: give an earlier since, or train on first"
        )
    newest = newest_version(folder)
    if newest is not None:
        before = WeightPatch.open(folder, newest)
        if newest != delta.since:
            raise StateError(
                f"{folder} must be followed up from version {newest}, its newest, not from {delta.since}: pass "
                f"since={newest}, or, where training went back behind it, publish to another folder"
            )
        if [mark.after for mark in before.tensors] != [mark.before for mark in delta.tensors]:
            raise StateError(
                f"the state must have had the weights of version {newest} of {folder} at step {newest}, but it had "
                "others: of another run, or training went back behind it; publish to another folder"
            )
    tensors, data = [], []
    for mark in delta.tensors:
        if (changes := delta.changes.get(mark.name)) is None:
            continue
        if changes.indices[-1] > np.iinfo(np.int32).max:
            raise StateError(f"{mark.name!r} must have fewer than 2^31 elements for int32 indices; publish it whole")
        tensors.append(StoredTensor(f"{mark.name}.{_INDICES}", "I32", changes.indices.shape))
        tensors.append(StoredTensor(f"{mark.name}.{_VALUES}", _FORMATS[mark.dtype], changes.indices.shape))
        data += [changes.indices.astype("<i4").view(np.uint8), np.ascontiguousarray(changes.words).view(np.uint8)]
    path.unlink(missing_ok=True)  # of a publisher that was killed before its manifest
    versions = {"base_version": str(delta.since), "version": str(delta.step)}
    size_bytes = write_tensors(path, tensors, {"format": "pt"} | versions, data)
    digest = _digest(path)
    about = {
        "format": _FORMAT,
        "base_version": delta.since,
        "version": delta.step,
        "identity": delta.identity,
        "file": path.name,
        "size_bytes": size_bytes,
        "sha256": digest,
        "tensors": [mark.to_json() for mark in delta.tensors],
    }
    try:
        write_durably(manifest, json.dumps(about, indent=1), keep_existing=True)
    except OSError as error:
        raise StateError(f"{manifest} cannot be written ({error.strerror}): choose another folder") from error
    return WeightPatch(delta.since, delta.step, delta.tensors, path, size_bytes, digest)


def newest_version(folder: Path) -> int | None:
    """The newest version that a folder has whole, None where it has none. Raises StateError for no folder."""
    try:
        found = [_MANIFEST.fullmatch(path.name) for path in folder.iterdir()]
    except OSError as error:
        raise StateError(f"{folder} must be a folder of versions ({error.strerror}); check the path") from error
    return max((int(match[1]) for match in found if match), default=None)


def apply_patch(patch: WeightPatch, weights: Mapping[str, NDArray[Any]]) -> int:
    """Bring a checkpoint's words (uint16 or uint32 arrays of any shape, contiguous) to the patch's version, in place.

    Returns the words that were written. Raises StateError, with nothing changed, where a tensor is missing, is another
    one, or does not have the weights that the patch begins with.
    """
    flat: dict[str, NDArray[Any]] = {}
    changes = list(patch.changes())
    for mark, change in changes:
        if (words := weights.get(mark.name)) is None:
            raise StateError(f"the checkpoint must have {mark.name!r}, which version {patch.version} is of")
        if (words.shape, words.dtype) != (mark.shape, change.words.dtype) or not words.flags.c_contiguous:
            raise StateError(
                f"{mark.name!r} must be words of {mark.dtype} {list(mark.shape)}, not {words.dtype} {list(words.shape)}"
            )
        flat[mark.name] = words.reshape(-1)
        _check_base(patch, mark, fingerprint_bytes(flat[mark.name].view(np.uint8)))
        after = flat[mark.name].copy()
        _check_after(patch, mark, change, after)
    for mark, change in changes:
        flat[mark.name][change.indices] = change.words
    return sum(change.indices.size for _, change in changes)


def patch_checkpoint(patch: WeightPatch, source: Path, target: Path) -> int:
    """Write the patch's version of a safetensors file to a new one, tensor by tensor; returns its bytes.

    Tensors that the patch does not name are copied. Raises as `apply_patch`, StorageFullError; nothing is left then.
    """
    file = TensorFile(source)
    every = {mark.name: (mark, change) for mark, change in patch.changes()}
    for mark, _ in every.values():
        wanted = StoredTensor(mark.name, _FORMATS[mark.dtype], mark.shape)
        if file.tensors.get(mark.name) != wanted:
            raise StateError(f"{source} must hold {wanted}, not {file.tensors.get(mark.name)}")

    def contents() -> Iterator[NDArray[np.uint8]]:
        for name, tensor in file.tensors.items():
            content = file.read(name, 0, tensor.size_bytes)
            file.check(name, crc32c(content))
            if name in every:
                mark, change = every[name]
                _check_base(patch, mark, fingerprint_bytes(content))
                content = content.copy()
                _check_after(patch, mark, change, content.view(change.words.dtype))
            yield content

    metadata = {name: text for name, text in file.metadata.items() if not name.endswith("crc32c")}
    return write_tensors(target, list(file.tensors.values()), metadata, contents())


def _check_base(patch: WeightPatch, mark: TensorMark, found: int) -> None:
    if found != mark.before:
        raise StateError(
            f"{mark.name!r} must be as in version {patch.base_version}, from which version {patch.version} follows, "
            f"not with fingerprint {found:016x} for {mark.before:016x}; apply the versions between, or load that one"
        )


def _check_after(patch: WeightPatch, mark: TensorMark, change: Changes, words: NDArray[Any]) -> None:
    """Apply a change to words, and compare them with the manifest."""
    if change.indices.size and not (change.indices.min() >= 0 and change.indices.max() < words.size):
        raise StateError(f"{patch.path}: indices of {mark.name!r} must be below {words.size}; publish it again")
    words[change.indices] = change.words
    if fingerprint_bytes(words.view(np.uint8)) != mark.after:
        raise StateError(f"{patch.path}: {mark.name!r} does not become what its manifest states; publish it again")


def _names(folder: Path, version: int) -> tuple[Path, Path]:
    return folder / f"version-{version:08d}.json", folder / f"version-{version:08d}.safetensors"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(file: TensorFile, name: str) -> NDArray[np.uint8]:
    if name not in file.tensors:
        raise StateError(f"{file.path} must have {name!r}; publish it again")
    content = file.read(name, 0, file.tensors[name].size_bytes)
    file.check(name, crc32c(content))
    return content
