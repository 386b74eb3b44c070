"""States to and from files of tensors, and from one number of files to another. All of it streams, extent by extent.

Tensors of the parameters have their own names and are fp32 masters; beside each lie its moments under torch's names
(`weight.exp_avg`), its scales where a moment has them (`weight.exp_avg.scale`), and `weight.step`, a scalar. What else
belongs to the state is JSON in the metadata, under `nearflash`: a state that is exported and imported is the same to
the bit, but for the padding between tensors. Checksums of header and tensors are compared when it is imported.
"""

import json
import secrets
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError, UncheckedWarning
from nearflash.abi.formats import FP32
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.direct import aligned_buffer
from nearflash.storage.state.manifest import (
    ADAM_ARRAYS,
    EXTENT_ALIGNMENT,
    EXTENT_PARAMS,
    Extent,
    Manifest,
    StateArray,
    TensorEntry,
)
from nearflash.storage.state.metadata import decode_metadata, encode_metadata
from nearflash.storage.state.safetensors import StoredTensor, TensorFile, write_tensors
from nearflash.storage.state.state_store import StateStore
from nearflash.storage.state.stripe import Stripe
from nearflash.storage.state.superblock import Stamp
from nearflash.support.tables import check_fields, check_integers

__all__ = ["export_state", "import_state", "reshard"]

_FORMATS = {4: "F32", 2: "BF16", 1: "U8"}
_STEP = "step"


def export_state(store: StateStore, path: Path) -> int:
    """Write the committed step to a safetensors file; returns its bytes. Raises StateError, StorageFullError."""
    manifest = store.manifest
    tensors = [StoredTensor(f"{tensor.name}.{_STEP}", "F32", ()) for tensor in manifest.tensors]
    for array in manifest.arrays:
        tensors += [_tensor_of(manifest, array, tensor) for tensor in manifest.tensors]
    about = {
        "profile": store.profile,
        "steps": store.steps,
        "tensor_steps": store.tensor_steps,
        "manifest": manifest.to_json(),
        "metadata": encode_metadata(store.metadata),
    }
    return write_tensors(path, tensors, {"format": "pt", "nearflash": json.dumps(about)}, _pieces(store))


def import_state(
    source: Path,
    paths: Sequence[Path],
    *,
    stripe_ratio: Iterable[int] | None = None,
    profile: str | None = None,
    extent_params: int = EXTENT_PARAMS,
    direct: bool = True,
) -> StateStore:
    """A new state from a safetensors file.

    One that `export_state` wrote gives everything. Of another one every tensor must be F32; moments of AdamW and steps
    are taken where they are, else they are zero, and `profile` (`ieee` unless given) and `extent_params` count; it has
    no checksums, of which UncheckedWarning tells. Raises StateError, also for another profile than an export's own.
    """
    file = TensorFile(source)
    if file.checksums is None:
        if "nearflash" in file.metadata:
            raise StateError(f"{source} must have the checksums of an export; export the state again")
        warnings.warn(f"{source} has no checksums, as another program wrote it: its values are taken unchecked",
                      UncheckedWarning, stacklevel=2)  # fmt: skip
    try:
        about = _about(file, profile, extent_params)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"{source} must describe a state in its metadata, or hold fp32 tensors ({error!r})") from error
    manifest: Manifest = about["manifest"]
    for array in manifest.arrays:
        for tensor in manifest.tensors:
            wanted = _tensor_of(manifest, array, tensor)
            in_file = file.tensors.get(wanted.name)
            if in_file != wanted and (in_file or array.name == "p" or "nearflash" in file.metadata):
                raise StateError(f"{source} must hold {wanted}, not {in_file}; export the state again")

    seen: dict[str, int] = {}

    def fill(name: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        array = manifest.array(name)
        for tensor in manifest.tensors:
            first, last = max(tensor.start, extent.start), min(tensor.start + tensor.params, extent.stop)
            if first < last and (stored := _tensor_of(manifest, array, tensor).name) in file.tensors:
                start, stop = array.size_bytes(first - tensor.start), array.size_bytes(last - tensor.start)
                at = array.size_bytes(first - extent.start)
                piece = memory[at : at + stop - start]
                piece[:] = file.read(stored, start, stop)
                seen[stored] = crc32c(piece, seen.get(stored, 0))
                if last == tensor.start + tensor.params:
                    file.check(stored, seen[stored])

    stamp = Stamp(secrets.token_hex(8), about["profile"], about["steps"], secrets.token_hex(8))
    stripe = Stripe.among(len(paths), stripe_ratio)
    return StateStore.build(
        paths, manifest, fill, stripe, stamp, about["tensor_steps"], about["metadata"], direct=direct
    )


def reshard(
    store: StateStore, paths: Sequence[Path], *, stripe_ratio: Iterable[int] | None = None, direct: bool = True
) -> StateStore:
    """The committed step striped over other files; `store` stays as it is. Raises StateError, StorageFullError."""
    stripe = Stripe.among(len(paths), stripe_ratio)
    return StateStore.build(
        paths, store.manifest, store.read, stripe, store.stamp, store.tensor_steps, store.metadata, direct=direct
    )


def _about(file: TensorFile, profile: str | None, extent_params: int) -> dict[str, Any]:
    if "nearflash" in file.metadata:
        about: dict[str, Any] = json.loads(file.metadata["nearflash"])
        kinds = {"profile": str, "steps": int, "tensor_steps": list, "manifest": dict, "metadata": dict}
        check_fields(f"the metadata of {file.path}", about, **kinds)
        if profile not in (None, about["profile"]):
            raise StateError(f"profile must be {about['profile']!r} as in {file.path}, not {profile!r}: leave it out")
        manifest = Manifest.from_json(about["manifest"])
        if len(check_integers("tensor_steps", about["tensor_steps"])) != len(manifest.tensors):
            raise StateError(f"tensor_steps of {file.path} must be of {len(manifest.tensors)} tensors")
        if manifest.params * FP32.bytes > file.file.size_bytes + 128 * len(manifest.tensors) + EXTENT_ALIGNMENT * 4:
            raise StateError(f"{file.path} must hold its {manifest.params} parameters; it was cut short")
        return about | {"manifest": manifest, "metadata": decode_metadata(about["metadata"])}
    beside = tuple(f".{name}" for name in (*[array.torch_name for array in ADAM_ARRAYS[1:]], _STEP))
    tensors = [(name, tensor.shape, "float32") for name, tensor in file.tensors.items() if not name.endswith(beside)]
    steps = [_scalar(file, f"{name}.{_STEP}") for name, _, _ in tensors]
    manifest = Manifest.pack(tensors, extent_params)
    about = {"profile": "ieee" if profile is None else profile, "steps": max(steps), "tensor_steps": steps}
    return about | {"manifest": manifest, "metadata": {}}


def _scalar(file: TensorFile, name: str) -> int:
    if file.tensors.get(name) != StoredTensor(name, "F32", ()):
        return 0
    return int(file.read(name, 0, FP32.bytes).view("<f4")[0])


def _tensor_of(manifest: Manifest, array: StateArray, tensor: TensorEntry) -> StoredTensor:
    """The tensor of the file that an array's part of a tensor is."""
    if array.name == "p":
        return StoredTensor(tensor.name, "F32", tensor.shape)
    base = manifest.array(array.name.removesuffix("_scale"))
    name = f"{tensor.name}.{base.torch_name or base.name}{'' if base is array else '.scale'}"
    elements = array.size_bytes(tensor.params) // array.element_bytes
    shape = tensor.shape if array.params_per_element == 1 else (elements,)
    return StoredTensor(name, _FORMATS[array.element_bytes], shape)


def _pieces(store: StateStore) -> Iterator[NDArray[np.uint8]]:
    """The bytes of the steps and of all arrays' tensors, each extent read once."""
    yield np.array(store.tensor_steps, "<f4").view(np.uint8)
    for array in store.manifest.arrays:
        memory, extents = aligned_buffer(array.extent_bytes(store.manifest.extents[0])), iter(store.manifest.extents)
        extent = next(extents)
        store.read(array.name, extent, memory[: array.extent_bytes(extent)])
        for tensor in store.manifest.tensors:
            at, stop = tensor.start, tensor.start + tensor.params
            while at < stop:
                if at >= extent.stop:
                    extent = next(extents)
                    store.read(array.name, extent, memory[: array.extent_bytes(extent)])
                    continue
                last = min(stop, extent.stop)
                yield memory[array.size_bytes(at - extent.start) : array.size_bytes(last - extent.start)]
                at = last
