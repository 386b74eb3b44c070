"""Files of tensors by name, written in one pass and read in place.

    header length (8 bytes, little endian) | header (JSON, padded with spaces to 8 bytes) | tensors, one after another

Files that are written here have checksums in their metadata: `crc32c`, a JSON list of one for each tensor, in order,
and `header_crc32c`, of the header's bytes with zeros in its own place. Other readers pass over them.

Source: the safetensors format, github.com/huggingface/safetensors, README "Format".
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError, StorageFullError
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.unchanged import UnchangedFile
from nearflash.support.files import replace_file

__all__ = [
    "ITEM_BYTES",
    "Checksums",
    "StoredTensor",
    "TensorFile",
    "encode_header",
    "new_file",
    "tensors_header",
    "write_tensors",
]

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""Formats that are read and written here, with the bytes of an element."""
_HEADER, _TENSORS = "header_crc32c", "crc32c"
_ZEROS = b'"%s":"%s"' % (_HEADER.encode(), b"0" * 8)
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

    The file (mode 0600) has its name as soon as it is complete and durable. Raises StateError where it exists or names
    are twice there, StorageFullError; nothing is left then.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise StateError(f"{path} cannot be written: the names of its {len(names)} tensors must differ")
    with new_file(path) as file:
        return _write(file, path, tensors, metadata, data)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file (mode 0600) to be written, which has its name as soon as it is complete and durable.

    Raises StateError where it exists, StorageFullError where it cannot be written; nothing is left then.
    """
    if os.path.lexists(path):
        raise StateError(f"{path} must not exist yet")
    try:
        with replace_file(path, keep_existing=True) as file:
            yield file
    except FileExistsError as error:
        raise StateError(f"{path} must not exist yet: another one was written meanwhile") from error
    except OSError as error:
        if isinstance(error, StateError):
            raise
        raise StorageFullError(f"{path} cannot be written ({error.strerror}): choose another place") from error


def _write(
    file: IO[bytes],
    path: Path,
    tensors: Sequence[StoredTensor],
    metadata: Mapping[str, str],
    data: Iterable[NDArray[np.uint8]],
) -> int:
    """The header, with zeros for checksums, the tensors, and then the header as it is."""
    text = tensors_header(tensors, metadata, [0] * len(tensors))
    file.write(struct.pack("<Q", len(text)) + text)
    checksums = Checksums(tensors)
    for piece in data:
        file.write(piece.data)
        checksums.add(piece)
    if not checksums.complete:
        raise StateError(f"{path} must get {checksums.size_bytes} bytes of tensors, not {checksums.seen_bytes}")
    file.seek(8)
    file.write(tensors_header(tensors, metadata, checksums.values))
    return 8 + len(text) + checksums.size_bytes


def tensors_header(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str], checksums: Sequence[int], size_bytes: int = 0
) -> bytes:
    """The header of a file of these tensors, one after another, with their CRC32C; of `size_bytes` bytes at least."""
    texts = json.dumps([f"{checksum:08x}" for checksum in checksums], separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {**metadata, _TENSORS: texts, _HEADER: "0" * 8}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    return encode_header(header, size_bytes)


def encode_header(header: Mapping[str, Any], size_bytes: int = 0) -> bytes:
    """The header's bytes, of whole 8 and `size_bytes` at least, with their checksum where its metadata has a place."""
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and _HEADER in metadata:
        header = {**header, "__metadata__": {**metadata, _HEADER: "0" * 8}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(size_bytes) + b" " * (-max(len(text), size_bytes) % 8)
    return text.replace(_ZEROS, b'"%s":"%08x"' % (_HEADER.encode(), crc32c(np.frombuffer(text, np.uint8))), 1)


class Checksums:
    """CRC32C of tensors whose bytes come one after another, in pieces."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self._ends = list(accumulate(tensor.size_bytes for tensor in tensors))
        self.values = [0] * len(tensors)
        self.seen_bytes = self._tensor = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return self._ends[-1] if self._ends else 0

    @property
    def complete(self) -> bool:
        """Whether all bytes came, and no more."""
        return self.seen_bytes == self.size_bytes

    def add(self, piece: NDArray[np.uint8]) -> None:
        """The next bytes."""
        at = 0
        while at < len(piece) and self._tensor < len(self._ends):
            count = min(self._ends[self._tensor] - self.seen_bytes, len(piece) - at)
            self.values[self._tensor] = crc32c(piece[at : at + count], self.values[self._tensor])
            at, self.seen_bytes = at + count, self.seen_bytes + count
            self._tensor += self.seen_bytes == self._ends[self._tensor]
        self.seen_bytes += len(piece) - at


# Not safetensors.safe_open: for numpy it rejects BF16 tensors unless ml_dtypes is there, and it maps the file, so that
# one that is cut meanwhile ends the process.
class TensorFile:
    """An existing file, open for reading. Raises StateError where it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = UnchangedFile(path)
            self._read()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(f"{path} must be a safetensors file ({error}); check the path or copy it again") from error

    def _read(self) -> None:
        length = int.from_bytes(self.file.read(0, 8).tobytes(), "little")
        if length > min(_LONGEST, self.file.size_bytes - 8):
            raise ValueError("the header is longer than the file")
        text = self.file.read(8, length).tobytes()
        header = json.loads(text, object_pairs_hook=_unique)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.tensors = {name: StoredTensor(name, body["dtype"], tuple(body["shape"])) for name, body in header.items()}
        self._offsets = {name: tuple(body["data_offsets"]) for name, body in header.items()}
        self.checksums = self._checksums(text)
        """CRC32C of each tensor's bytes; None in files of other writers."""
        self.start: int = 8 + length
        """Offset of the tensors in the file."""
        sizes = [size for tensor in self.tensors.values() for size in tensor.shape]
        if any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError("shapes must be of integers of at least 0")
        end = 0
        for name, (first, last) in sorted(self._offsets.items(), key=lambda item: item[1]):
            known = self.tensors[name].dtype in ITEM_BYTES
            size_bytes = self.tensors[name].size_bytes if known else last - first
            if (
                type(first) is not int
                or type(last) is not int
                or last < first
                or first != end
                or last - first != size_bytes
            ):
                raise ValueError(f"{name!r} must begin behind the tensor before it and have the bytes of its shape")
            end = last
        if self.start + end != self.file.size_bytes:
            raise ValueError(f"its tensors must fill the {self.file.size_bytes - self.start} bytes after the header")

    def _checksums(self, text: bytes) -> dict[str, int] | None:
        if not {_HEADER, _TENSORS} & self.metadata.keys():
            return None
        stated = self.metadata[_HEADER]
        zeros = text.replace(b'"%s":"%s"' % (_HEADER.encode(), stated.encode()), _ZEROS, 1)
        if f"{crc32c(np.frombuffer(zeros, np.uint8)):08x}" != stated:
            raise ValueError("the header is damaged: its checksum is another")
        values = [int(value, 16) for value in json.loads(self.metadata[_TENSORS])]
        return dict(zip(self.tensors, values, strict=True))

    def check(self, name: str, checksum: int) -> None:
        """Raise StateError where a tensor's bytes, whose CRC32C is `checksum`, are not those that were written."""
        if self.checksums is not None and self.checksums[name] != checksum:
            raise StateError(
                f"{self.path}: tensor {name!r} is damaged: its checksum is another; export the state again"
            )

    def offset_of(self, name: str) -> int:
        """Byte offset of a tensor in the file."""
        return self.start + int(self._offsets[name][0])

    def size_of(self, name: str) -> int:
        """Bytes of a tensor."""
        first, last = self._offsets[name]
        return int(last - first)

    def read(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes `start` to `stop` of a tensor. Raises StateError where the file was changed since it was opened."""
        try:
            return self.file.read(self.offset_of(name) + start, stop - start)
        except OSError as error:
            raise StateError(f"{self.path}: reading tensor {name!r} failed ({error.strerror})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name must not be there twice")
    return unique
