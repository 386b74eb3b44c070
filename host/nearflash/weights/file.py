"""Files of weights: safetensors in which a tensor may be stored compressed.

A compressed tensor is of uint8, the bytes that `pack`, `pack_coded`, `pack_rans`, `pack_groups` gave. The metadata has
`nearflash_weights`, the version, and `nearflash_tensors`, a JSON object from the name of each compressed tensor to its
own `dtype` and `shape` and its `form`. Other readers find tensors of bytes. Checksums lie in the header, by tensor, so
that no other tensor's bytes hold in a tensor's place. Layout: docs/contracts/weights.md, section 4.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, SECTION_BYTES, BitmapHeader, check_groups
from nearflash.abi.coded import CodedHeader
from nearflash.abi.errors import StateError, StreamError, WeightsError
from nearflash.abi.rans import RansHeader
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.storage.io.unchanged import UnchangedFile
from nearflash.storage.state.safetensors import ITEM_BYTES, StoredTensor, TensorFile, new_file, tensors_header

__all__ = [
    "BYTE_DTYPES",
    "CHECKPOINT",
    "FORMS",
    "VERSION",
    "PackedTensor",
    "TensorExpander",
    "WeightsTensor",
    "read_checkpoint_file",
    "read_file",
    "write_file",
]

VERSION = 2
_VERSIONS = ("", "1", str(VERSION))
"""That are read; the first is of other programs' files. Version 1 has the checksum of whole tensors alone."""
FORMS = ("dense", "bitmap", "coded", "rans", "int8", "int4")
"""How a tensor is stored: as it is; as a bitmap matrix, whatever its elements; as coded weights; as rANS-coded
bytes; in groups of 64 columns, without a bitmap."""
BYTE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
"""Of tensors that can be of rANS-coded bytes."""
_STREAMS: Mapping[str, type[BitmapHeader] | type[CodedHeader] | type[RansHeader]] = {
    "bitmap": BitmapHeader, "coded": CodedHeader, "rans": RansHeader,
}  # fmt: skip
"""Forms whose header states their groups, which state their bytes."""
_VERSION, _TENSORS, _ROWS = "nearflash_weights", "nearflash_tensors", "nearflash_rows"
CHECKPOINT = "nearflash_checkpoint"
"""Key of the metadata: what the files of one checkpoint, and its index, state alike."""
_ROWS_DIMENSIONS, _MOST_ROWS = 3, 1 << 12
"""Dense tensors whose rows of the first dimension, a mixture's experts, have checksums of their own."""
_CRC_BYTES = 4
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


class TensorExpander(Protocol):
    """A device that reads tensors from its own drive (nearflash.weights.on_device)."""

    def expand(self, tensor: "WeightsTensor", out: NDArray[Any]) -> None:
        """Fill `out` with the dense tensor. Raises WeightsError for a damaged one."""


@dataclass(frozen=True)
class WeightsTensor:
    """A tensor in a file, not read yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the dense tensor."""
    form: str
    file: UnchangedFile
    offset: int
    """In the file."""
    stored_bytes: int
    checksum: int | None
    """CRC32C of the bytes; None where the file has none, and for streams, which have their own."""
    stream_checksum: int | None = None
    """Of streams: CRC32C of the header, which states the groups, which state their bytes."""
    row_checksums: tuple[int, ...] = ()
    """CRC32C of each row of the first dimension, of dense tensors of three dimensions; none in older files."""
    expander: "TensorExpander | None" = None
    """Who reads and expands a bitmap matrix or coded weights where they lie, in place of the host."""

    @property
    def is_expanded_by_host(self) -> bool:
        """Whether the host reads its stored bytes."""
        return self.expander is None or self.form not in _STREAMS

    @property
    def path(self) -> Path:
        """The file's."""
        return self.file.path

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self, memory: Callable[[int], NDArray[np.uint8]] = reuse_buffer) -> NDArray[np.uint8]:
        """The bytes in the file, past the page cache where the file system can; checked where there is a checksum.

        memory: gives aligned memory of so many bytes, a part of which comes back. Raises WeightsError.
        """
        data = self.load(memory)
        self.check(data)
        return data

    def load(self, memory: Callable[[int], NDArray[np.uint8]] = reuse_buffer) -> NDArray[np.uint8]:
        """As `read`, but nothing is checked: for who does that in another thread."""
        before = self.offset % BLOCK_BYTES
        blocks = -(-(before + self.stored_bytes) // BLOCK_BYTES)
        buffer, end = memory(max(blocks, 1) * BLOCK_BYTES), before + self.stored_bytes
        try:
            done = self.file.scatter([buffer[: blocks * BLOCK_BYTES].data], self.offset - before, direct=True)
        except OSError as error:
            raise self.error(f"reading failed ({error.strerror})") from error
        if done < end:
            raise self.error(f"the file ends {end - done} bytes too early")
        return buffer[before:end]

    def check(self, data: NDArray[np.uint8]) -> None:
        """Compare the bytes that `load` gave with the file's checksums, where it has some, so that they are this
        tensor's; a stream's groups are compared with their own when they are expanded. Raises WeightsError.
        """
        if self.checksum is not None and crc32c(data) != self.checksum:
            raise self.error("it is damaged: its checksum is another")
        if self.stream_checksum is None:
            return
        try:
            text = data[:HEADER_BYTES].tobytes()
            header = _STREAMS[self.form].unpack(text, len(data))
            if int.from_bytes(text[-_CRC_BYTES:], "little") != self.stream_checksum:
                raise self.error("it is another tensor's: its header has another checksum")
            check_groups(data.data, header)
        except StreamError as error:
            raise self.error(error) from error

    def row(self, number: int) -> "WeightsTensor":
        """Row `number` of the first dimension of a dense tensor. Its checksum is None where the file has none of it."""
        size = self.stored_bytes // self.shape[0]
        checksum = self.row_checksums[number] if self.row_checksums else None
        return replace(
            self, shape=self.shape[1:], offset=self.offset + number * size, stored_bytes=size, checksum=checksum,
            row_checksums=(),
        )  # fmt: skip

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
    longest = {name: _describe(dtype, shape, "bitmap", 0) for name, (dtype, shape) in planned.items()}
    dense = [StoredTensor(name, dtype, shape) for name, (dtype, shape) in planned.items()]
    metadata = {"format": "pt", **(metadata or {})}  # without it transformers takes a file for another framework's
    all_rows = {name: [0] * shape[0] for name, (_, shape) in planned.items() if _has_rows(shape)}
    header_bytes = len(tensors_header(dense, {**metadata, **_make_metadata(longest, all_rows)}, [0] * len(dense)))
    start = -(-(8 + header_bytes + len(dense) * _LONGEST_BYTES) // SECTION_BYTES) * SECTION_BYTES
    written: list[StoredTensor] = []
    checksums, described, rows = [], {}, {}
    with new_file(path) as file:
        file.write(bytes(start))
        for tensor in tensors:
            if planned.get(tensor.name) != (tensor.dtype, tensor.shape):
                raise StateError(f"{path} cannot be written: tensor {tensor.name!r} was not planned so")
            if tensor.form == "dense":
                written.append(StoredTensor(tensor.name, tensor.dtype, tensor.shape))
                if _has_rows(tensor.shape):
                    rows[tensor.name] = [crc32c(row) for row in tensor.data.reshape(tensor.shape[0], -1)]
            else:
                written.append(StoredTensor(tensor.name, "U8", (len(tensor.data),)))
                described[tensor.name] = _describe(tensor.dtype, tensor.shape, tensor.form, _stream_checksum(tensor))
            checksums.append(crc32c(tensor.data))
            file.write(tensor.data.data)
        if {tensor.name for tensor in written} != planned.keys() or len(written) != len(planned):
            raise StateError(f"{path} cannot be written: {len(written)} tensors came, not the {len(planned)} planned")
        header = tensors_header(written, {**metadata, **_make_metadata(described, rows)}, checksums, start - 8)
        assert len(header) == start - 8
        file.seek(0)
        file.write(len(header).to_bytes(8, "little") + header)
    return start + sum(tensor.size_bytes for tensor in written)


def _has_rows(shape: Sequence[int]) -> bool:
    return len(shape) >= _ROWS_DIMENSIONS and 1 < shape[0] <= _MOST_ROWS and prod(shape) > 0


def _stream_checksum(tensor: PackedTensor) -> int | None:
    """CRC32C of a stream's header."""
    return int(tensor.data[:HEADER_BYTES].view("<u4")[-1]) if tensor.form in _STREAMS else None


def _make_metadata(described: Mapping[str, object], rows: Mapping[str, Sequence[int]]) -> dict[str, str]:
    texts = {name: [f"{checksum:08x}" for checksum in checksums] for name, checksums in rows.items()}
    metadata = {_VERSION: str(VERSION), _TENSORS: json.dumps(described, separators=(",", ":"))}
    return {**metadata, _ROWS: json.dumps(texts, separators=(",", ":"))} if texts else metadata


def _describe(dtype: str, shape: Sequence[int], form: str, stream_checksum: int | None) -> dict[str, object]:
    stream = {} if stream_checksum is None else {"header_crc32c": f"{stream_checksum:08x}"}
    return {"dtype": dtype, "shape": list(shape), "form": form, **stream}


def read_file(path: Path) -> dict[str, WeightsTensor]:
    """The tensors of a file by name, those of another program's, too; it stays open as long as one of them is there.

    Raises WeightsError; reading a tensor raises it, too, where the file was changed after this call.
    """
    return read_checkpoint_file(path)[0]


def read_checkpoint_file(path: Path) -> tuple[dict[str, WeightsTensor], str]:
    """As `read_file`, and what the file states of its checkpoint; "" where it states nothing. Raises WeightsError."""
    try:
        file = TensorFile(path)
    except StateError as error:
        raise WeightsError(str(error)) from error
    version = file.metadata.get(_VERSION, "")
    if version not in _VERSIONS:
        raise WeightsError(f"{path} must be of version {VERSION} or 1, not {version}: use a newer nearflash")
    if version and file.checksums is None:
        raise WeightsError(f"{path} must have the checksums that nearflash writes: compress the model again")
    try:
        described = json.loads(file.metadata[_TENSORS]) if version else {}
        rows = json.loads(file.metadata.get(_ROWS, "{}")) if version else {}
        tensors = {
            name: _open_tensor(file, stored, described.get(name), rows.get(name, ()), version == "1")
            for name, stored in file.tensors.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: its metadata must describe its compressed tensors ({error})") from error
    if missing := described.keys() - tensors.keys():
        raise WeightsError(f"{path}: tensor {sorted(missing)[0]!r} must be there, as the metadata states")
    return tensors, str(file.metadata.get(CHECKPOINT, ""))


def _dtypes_of(form: str) -> tuple[str, ...]:
    """The dtypes of dense tensors that a compressed form is for."""
    return BYTE_DTYPES if form == "rans" else ("F16", "BF16", "I8")


def _open_tensor(
    file: TensorFile, stored: StoredTensor, described: Mapping[str, object] | None, rows: Sequence[str], old: bool
) -> WeightsTensor:
    location = file.file, file.offset_of(stored.name), file.size_of(stored.name)
    checksum = file.checksums[stored.name] if file.checksums else None
    if described is None:
        if rows and (not stored.shape or len(rows) != stored.shape[0]):
            raise ValueError(f"{stored.name!r} has {len(rows)} checksums of rows and the shape {stored.shape}")
        row_checksums = tuple(int(row, 16) for row in rows)
        return WeightsTensor(stored.name, stored.dtype, stored.shape, "dense", *location, checksum, None, row_checksums)
    dtype, shape, form = described["dtype"], described["shape"], described["form"]
    right = stored.dtype == "U8" and form in FORMS[1:] and dtype in _dtypes_of(str(form))
    if (
        not right
        or not isinstance(shape, list)
        or not shape
        or not all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(f"{stored.name!r} is stored as {stored.dtype}, stated to be {described}")
    if prod(shape) > 8 * location[-1]:  # an element takes a bit at least: nobody makes room for what cannot be there
        raise ValueError(f"{stored.name!r} has {location[-1]} bytes, too few for the shape {shape}")
    if form in _STREAMS and not old:
        stream = int(str(described["header_crc32c"]), 16)
        return WeightsTensor(stored.name, str(dtype), tuple(shape), str(form), *location, None, stream)
    return WeightsTensor(stored.name, str(dtype), tuple(shape), str(form), *location, checksum)
