"""The place of each tensor in the flat parameter vector, which arrays are stored of it, and how it is cut into extents.

Tensors follow one another, each padded to 32 parameters: 16 fill the widest device port and are the vectors on which
the optimizer's profiles equal torch, 32 share a scale in 8-bit arrays. The vector is padded to whole blocks.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Self

from nearflash.abi.errors import AlignmentError, StateError
from nearflash.abi.formats import BF16, FP32
from nearflash.abi.optimizers import MasterFormat
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.support.tables import TableReader, at_least_zero

__all__ = ["ADAM_ARRAYS", "EXTENT_ALIGNMENT", "EXTENT_PARAMS", "Extent", "Manifest", "StateArray", "TensorEntry"]

TENSOR_ALIGNMENT = 32
"""Parameters to whose multiple each tensor is padded."""
EXTENT_ALIGNMENT = BLOCK_BYTES // FP32.bytes
"""Parameters to whose multiple an extent is cut: one block of direct I/O."""
EXTENT_PARAMS = 1 << 20
"""Parameters of an extent by default: 4 MiB an fp32 array, well over the 1 MB that NVMe drives need for their full
rate."""


def _round_up(params: int, multiple: int) -> int:
    return -(-params // multiple) * multiple


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `dtype` is the training script's (`float32`), the stored arrays are fp32 always."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    """First parameter in the flat vector, a multiple of 32."""

    @property
    def params(self) -> int:
        """Number of parameters, without padding."""
        return prod(self.shape)

    def describe(self) -> str:
        """Name, dtype and shape, for messages."""
        return f"{self.name!r} ({self.dtype}, {self.shape})"

    @property
    def stop(self) -> int:
        """End of the tensor's range, padding included."""
        return self.start + _round_up(self.params, TENSOR_ALIGNMENT)


@dataclass(frozen=True)
class Extent:
    """Parameters [start, start + params): the unit of I/O, of checksums and of device buffers."""

    index: int
    start: int
    params: int

    @property
    def stop(self) -> int:
        """End of the range."""
        return self.start + self.params

    @property
    def size_bytes(self) -> int:
        """Bytes of an fp32 array's extent, so of p's."""
        return self.params * FP32.bytes


@dataclass(frozen=True)
class StateArray:
    """One stored array: an element of `element_bytes` for every `params_per_element` parameters."""

    name: str
    element_bytes: int = FP32.bytes
    params_per_element: int = 1
    torch_name: str = ""
    """What torch.optim calls it (`exp_avg`); empty for p and for scales."""

    def size_bytes(self, params: int) -> int:
        """Bytes of the elements of `params` parameters (rounded up to whole elements)."""
        return -(-params // self.params_per_element) * self.element_bytes

    def extent_bytes(self, extent: Extent) -> int:
        """Bytes of the array's extent in file and memory: its elements, padded to whole blocks of 4096."""
        return _round_up(self.size_bytes(extent.params), BLOCK_BYTES)


ADAM_ARRAYS = (StateArray("p"), StateArray("m", torch_name="exp_avg"), StateArray("v", torch_name="exp_avg_sq"))
"""Master parameters, first and second moments, all fp32."""


_HALVES = tuple(StateArray(name, BF16.bytes) for name in MasterFormat.SPLIT.arrays)


@dataclass(frozen=True)
class Manifest:
    """Tensors in order, extent length in parameters (a multiple of 1024) and arrays, p first. Use `pack`.

    `arrays` are what a state is of, fp32 masters always; `stored` are what its files hold of them.
    """

    tensors: tuple[TensorEntry, ...]
    extent_params: int
    arrays: tuple[StateArray, ...] = ADAM_ARRAYS
    master: MasterFormat = MasterFormat.FP32

    @classmethod
    def pack(
        cls,
        tensors: Iterable[tuple[str, tuple[int, ...], str]],
        extent_params: int,
        arrays: Iterable[StateArray] = ADAM_ARRAYS,
        master: MasterFormat = MasterFormat.FP32,
    ) -> Self:
        """Lay out (name, shape, dtype) one after another. Raises AlignmentError, StateError."""
        if extent_params <= 0 or extent_params % EXTENT_ALIGNMENT:
            raise AlignmentError(
                f"extent_params must be a positive multiple of {EXTENT_ALIGNMENT}, not {extent_params!r}"
            )
        entries: list[TensorEntry] = []
        for name, shape, dtype in tensors:
            entries.append(TensorEntry(name, tuple(shape), dtype, entries[-1].stop if entries else 0))
        return cls(tuple(entries), extent_params, _check_arrays(tuple(arrays)), master)

    @property
    def params(self) -> int:
        """Length of the flat vector, padding included: a multiple of 1024, at least one."""
        return _round_up(max(self.tensors[-1].stop, 1) if self.tensors else 1, EXTENT_ALIGNMENT)

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """The extents in order; the last one may be shorter."""
        starts = range(0, self.params, self.extent_params)
        return tuple(Extent(i, s, min(self.extent_params, self.params - s)) for i, s in enumerate(starts))

    @cached_property
    def _by_name(self) -> dict[str, StateArray]:
        return {array.name: array for array in (*self.arrays, *self.stored)}

    @cached_property
    def stored(self) -> tuple[StateArray, ...]:
        """The arrays of the files: those of the state, but the halves of a split master in the place of p."""
        return (*_HALVES, *self.arrays[1:]) if self.master is MasterFormat.SPLIT else self.arrays

    def parts(self, name: str) -> tuple[str, ...]:
        """The stored arrays that hold an array."""
        return self.master.arrays if name == "p" else (name,)

    def array(self, name: str) -> StateArray:
        """The array of that name, of the state or of its files. Raises StateError where there is none."""
        if name not in self._by_name:
            raise StateError(f"array must be one of {', '.join(self._by_name)}, not {name!r}")
        return self._by_name[name]

    def names_in(self, extent: Extent) -> str:
        """Which tensors an extent holds, for messages."""
        inside = [repr(t.name) for t in self.tensors if max(t.start, extent.start) < min(t.stop, extent.stop)]
        return " to ".join(dict.fromkeys((inside[0], inside[-1]))) if inside else "padding"

    def difference(self, other: Self) -> str | None:
        """The first point in which `other` differs, as a sentence; None when they are equal."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                return f"tensor {mine.describe()}, not {theirs.describe()}"
        if len(self.tensors) != len(other.tensors):
            return f"{len(self.tensors)} tensors, not {len(other.tensors)}"
        if self.extent_params != other.extent_params:
            return f"extents of {self.extent_params} parameters, not {other.extent_params}"
        if self.master != other.master:
            return f"master {self.master}, not {other.master}"
        for stored, wanted in zip(self.arrays, other.arrays, strict=False):
            if stored != wanted:
                return f"array {stored}, not {wanted}"
        if len(self.arrays) != len(other.arrays):
            return f"{len(self.arrays)} arrays, not {len(other.arrays)}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain values for the state file, as JSON gives them back."""
        body: dict[str, Any] = json.loads(json.dumps(asdict(replace(self, arrays=self.stored))))
        del body["master"]  # its arrays tell
        return body

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """Inverse of `to_json`. Raises StateError for what `pack` does not give."""
        if "master" in body:
            raise StateError("a manifest must have no master: its arrays tell")
        reader = TableReader(StateError, at_least_zero, complete=True)
        stored = reader.parse(cls, {**body, "master": MasterFormat.FP32}, "manifest")
        split = stored.arrays[: len(_HALVES)] == _HALVES
        arrays = (StateArray("p"), *stored.arrays[len(_HALVES) :]) if split else stored.arrays
        try:
            entries = [(entry.name, entry.shape, entry.dtype) for entry in stored.tensors]
            master = MasterFormat.SPLIT if split else MasterFormat.FP32
            packed = cls.pack(entries, stored.extent_params, arrays, master)
        except AlignmentError as error:
            raise StateError(f"a manifest must describe a state: {error}") from error
        if packed.tensors != stored.tensors:
            raise StateError("tensors of a manifest must lie one after another, each padded to 32 parameters")
        return packed


def _check_arrays(arrays: tuple[StateArray, ...]) -> tuple[StateArray, ...]:
    names = [array.name for array in arrays]
    first = StateArray("p")
    if not arrays or arrays[0] != first:
        raise StateError(f"arrays must begin with {first}, not {arrays[:1]}")
    if len(set(names)) < len(names):
        raise StateError(f"arrays must have different names, not {names}")
    if taken := [name for name in names if name in MasterFormat.SPLIT.arrays]:
        raise StateError(f"arrays must not have the names of a split master's halves, as {taken[0]!r} has")
    for array in arrays:
        per_element = array.params_per_element
        if array.element_bytes not in (1, 2, 4) or per_element < 1 or EXTENT_ALIGNMENT % per_element:
            raise StateError(f"{array} must have whole elements in {EXTENT_ALIGNMENT} parameters; choose other sizes")
    return arrays
