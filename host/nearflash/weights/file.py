"""Files of weights: safetensors in which a tensor may be stored compressed.

A compressed tensor is of uint8, the bytes that `pack` or `pack_groups` gave. The metadata has `nearflash_weights`, the
version, and `nearflash_tensors`, a JSON object from the name of each compressed tensor to its own `dtype` and `shape`
and its `form`. Other readers find tensors of bytes. Layout: docs/contracts/weights.md, section 4.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import SECTION_BYTES
from nearflash.abi.errors import StateError, WeightsError
from nearflash.storage.io.backend import BLOCK_BYTES, PositionalBackend
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.reuse import reused_buffer
from nearflash.storage.state.safetensors import ITEM_BYTES, StoredTensor, TensorFile, new_file, tensors_header

__all__ = ["FORMS", "VERSION", "PackedTensor", "WeightsTensor", "read_file", "write_file"]

VERSION = 1
FORMS = ("dense", "bitmap", "int8", "int4")
"""How a tensor is stored: as it is; as a bitmap matrix, whatever its elements; in groups of 64 columns, without one."""
_VERSION, _TENSORS = "nearflash_weights", "nearflash_tensors"
_LONGEST_BYTES = 20
"""Digits that a size may have more than was planned for it, twice."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor ready to be written."""

    name: str
    dtype: str
    """Of the dense tensor, as safetensors names it: F16, BF16, …"""
    shape: tuple[int, ...]
    form: str
    """One of FORMS."""
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class WeightsTensor:
    """A tensor in a file, not read yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the dense tensor."""
    form: str
    path: Path
    offset: int
    """In the file."""
    stored_bytes: int
    checksum: int | None
    """CRC32C of a dense tensor's bytes; None where the file has none, and for bitmap matrices, which have their own."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self, memory: Callable[[int], NDArray[np.uint8]] = reused_buffer) -> NDArray[np.uint8]:
        """The bytes in the file, past the page cache where the file system can; checked where there is a checksum.

        memory: gives aligned memory of so many bytes, a part of which comes back. Raises WeightsError.
        """
        data = self.load(memory)
        self.check(data)
        return data

    def load(self, memory: Callable[[int], NDArray[np.uint8]] = reused_buffer) -> NDArray[np.uint8]:
        """As `read`, but nothing is checked: for who does that in another thread."""
        before = self.offset % BLOCK_BYTES
        blocks = -(-(before + self.stored_bytes) // BLOCK_BYTES)
        room, end = memory(max(blocks, 1) * BLOCK_BYTES), before + self.stored_bytes
        try:
            fd = _open(self.path)
            try:
                done = PositionalBackend().read(fd, room[: blocks * BLOCK_BYTES].data, self.offset - before)
            finally:
                os.close(fd)
        except OSError as error:
            raise self.error(f"reading failed ({error.strerror})") from error
        if done < end:
            raise self.error(f"the file ends {end - done} bytes too early")
        return room[before:end]

    def check(self, data: NDArray[np.uint8]) -> None:
        """Compare the bytes that `load` gave with the file's checksum, where it has one. Raises WeightsError."""
        if self.checksum is not None and crc32c(data) != self.checksum:
            raise self.error("it is damaged: its checksum is another")

    def error(self, what: object) -> WeightsError:
        """The error for this tensor."""
        return WeightsError(f"{self.path}: tensor {self.name!r}, at byte {self.offset}: {what}")


def write_file(
    path: Path,
    planned: Mapping[str, tuple[str, tuple[int, ...]]],
    tensors: Iterable[PackedTensor],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a file, one tensor after another as they come; returns its bytes.

    planned: dtype and shape of each tensor that is to come, so that the header finds room before them. The file (mode
    0600) has its name as soon as it is complete and durable. Raises StateError where it exists, or where others come
    than were planned, StorageFullError; nothing is left then.
    """
    compressed = {name: _described(dtype, shape, "bitmap") for name, (dtype, shape) in planned.items()}
    dense = [StoredTensor(name, dtype, shape) for name, (dtype, shape) in planned.items()]
    metadata = {"format": "pt", **(metadata or {})}  # without it transformers takes a file for another framework's
    room = len(tensors_header(dense, {**metadata, **_versioned(compressed)}, [0] * len(dense)))
    start = -(-(8 + room + len(dense) * _LONGEST_BYTES) // SECTION_BYTES) * SECTION_BYTES
    written: list[StoredTensor] = []
    checksums, described = [], {}
    with new_file(path) as file:
        file.write(bytes(start))
        for each in tensors:
            if planned.get(each.name) != (each.dtype, each.shape):
                raise StateError(f"{path} cannot be written: tensor {each.name!r} was not planned so")
            if each.form == "dense":
                written.append(StoredTensor(each.name, each.dtype, each.shape))
            else:
                written.append(StoredTensor(each.name, "U8", (len(each.data),)))
                described[each.name] = _described(each.dtype, each.shape, each.form)
            checksums.append(crc32c(each.data))
            file.write(each.data.data)
        if {each.name for each in written} != planned.keys() or len(written) != len(planned):
            raise StateError(f"{path} cannot be written: {len(written)} tensors came, not the {len(planned)} planned")
        header = tensors_header(written, {**metadata, **_versioned(described)}, checksums, start - 8)
        assert len(header) == start - 8
        file.seek(0)
        file.write(len(header).to_bytes(8, "little") + header)
    return start + sum(each.size_bytes for each in written)


def _versioned(described: Mapping[str, object]) -> dict[str, str]:
    return {_VERSION: str(VERSION), _TENSORS: json.dumps(described, separators=(",", ":"))}


def _described(dtype: str, shape: Sequence[int], form: str) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "form": form}


def read_file(path: Path) -> dict[str, WeightsTensor]:
    """The tensors of a file by name, those of another program's, too. Raises WeightsError."""
    try:
        file = TensorFile(path)
    except StateError as error:
        raise WeightsError(str(error)) from error
    version = file.metadata.get(_VERSION, "")
    if version not in ("", str(VERSION)):
        raise WeightsError(f"{path} must be of version {VERSION}, not {version}: use a newer nearflash")
    try:
        described = json.loads(file.metadata[_TENSORS]) if version else {}
        found = {name: _found(file, stored, described.get(name)) for name, stored in file.tensors.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: its metadata must describe its compressed tensors ({error})") from error
    if missing := described.keys() - found.keys():
        raise WeightsError(f"{path}: tensor {sorted(missing)[0]!r} must be there, as the metadata states")
    return found


def _found(file: TensorFile, stored: StoredTensor, described: Mapping[str, object] | None) -> WeightsTensor:
    at, size_bytes = file.offset_of(stored.name), len(file.bytes_of(stored.name))
    checksum = file.checksums[stored.name] if file.checksums else None
    if described is None:
        return WeightsTensor(stored.name, stored.dtype, stored.shape, "dense", file.path, at, size_bytes, checksum)
    dtype, shape, form = described["dtype"], described["shape"], described["form"]
    right = stored.dtype == "U8" and dtype in ("F16", "BF16", "I8") and form in FORMS[1:]
    if (
        not right
        or not isinstance(shape, list)
        or not shape
        or not all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(f"{stored.name!r} is stored as {stored.dtype}, stated to be {described}")
    if prod(shape) > 8 * size_bytes:  # an element takes a bit at least: nobody makes room for what cannot be there
        raise ValueError(f"{stored.name!r} has {size_bytes} bytes, too few for the shape {shape}")
    own = None if form == "bitmap" else checksum
    return WeightsTensor(stored.name, str(dtype), tuple(shape), str(form), file.path, at, size_bytes, own)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:  # a file system without O_DIRECT, or no file: the next call says which
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
