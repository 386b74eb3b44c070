"""Files of tensors by name, written in one pass and read in place.

    header length (8 bytes, little endian) | header (JSON, padded with spaces to 8 bytes) | tensors, one after another

Source: the safetensors format, github.com/huggingface/safetensors, README "Format".
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError, StorageFullError
from nearflash.storage.io.direct import flush_directory, partial_of

__all__ = ["ITEM_BYTES", "StoredTensor", "TensorFile", "write_tensors"]

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U16": 2, "U8": 1}
"""Formats that are read and written here, with the bytes of an element."""
_LONGEST = 100 << 20
"""Bytes of a header that are believed, as in the format's own reader."""


@dataclass(frozen=True)
class StoredTensor:
    """Name, format (a key of ITEM_BYTES) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def write_tensors(
    path: Path, tensors: Sequence[StoredTensor], metadata: Mapping[str, str], data: Iterable[NDArray[np.uint8]]
) -> int:
    """Write the tensors, whose bytes follow one another in the pieces of `data`; returns the file's bytes.

    The file has its name as soon as it is complete and durable. Raises StateError where it exists or names are twice
    there, StorageFullError; nothing is left then.
    """
    names = [tensor.name for tensor in tensors]
    if path.exists() or len(set(names)) < len(names):
        raise StateError(f"{path} must not exist yet, and the names of its {len(names)} tensors must differ")
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = partial_of(path)
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            written = sum(_write(file, piece) for piece in data)
            if written != end:
                raise StateError(f"{path} must get {end} bytes of tensors, not {written}")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        flush_directory(path.parent)
    except OSError as error:
        if isinstance(error, StateError):
            raise
        raise StorageFullError(f"{path} cannot be written ({error.strerror}): choose another place") from error
    finally:
        partial.unlink(missing_ok=True)
    return 8 + len(text) + end


def _write(file: BinaryIO, piece: NDArray[np.uint8]) -> int:
    return file.write(piece.data)


# Not safetensors.safe_open: for numpy it rejects BF16 tensors unless ml_dtypes is there, and gives no view of the file.
class TensorFile:
    """An existing file, its tensors mapped into memory. Raises StateError where it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._read()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise StateError(f"{path} must be a safetensors file ({error}); check the path or copy it again") from error

    def _read(self) -> None:
        size_bytes = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > min(_LONGEST, size_bytes - 8):
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.tensors = {name: StoredTensor(name, each["dtype"], tuple(each["shape"])) for name, each in header.items()}
        self._offsets = {name: tuple(each["data_offsets"]) for name, each in header.items()}
        start = 8 + length
        self._data = np.memmap(self.path, np.uint8, "r", start) if size_bytes > start else np.zeros(0, np.uint8)
        for name, (first, last) in self._offsets.items():
            known = self.tensors[name].dtype in ITEM_BYTES
            if not 0 <= first <= last <= len(self._data) or (known and last - first != self.tensors[name].size_bytes):
                raise ValueError(f"{name!r} must lie inside the file, where the header states")

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The bytes of one tensor, not to be written to."""
        first, last = self._offsets[name]
        part: NDArray[np.uint8] = self._data[first:last]
        return part
