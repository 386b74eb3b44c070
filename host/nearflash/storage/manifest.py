"""Where each tensor lies in the flat parameter vector, and how that vector is cut into extents.

Tensors follow one another, each padded to 16 parameters: the optimizer's profiles equal torch only on bodies of
whole 16-element vectors, and 16 fp32 parameters fill the widest device port. The vector is padded to whole blocks.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

from nearflash.abi.errors import AlignmentError, ShapeError
from nearflash.abi.formats import FP32
from nearflash.storage.direct import BLOCK_BYTES

__all__ = ["Extent", "Manifest", "TensorEntry"]

TENSOR_ALIGNMENT = 16
"""Parameters to whose multiple each tensor is padded."""
EXTENT_ALIGNMENT = BLOCK_BYTES // FP32.bytes
"""Parameters to whose multiple an extent is cut: one block of direct I/O."""


def _padded(params: int, multiple: int) -> int:
    return -(-params // multiple) * multiple


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `dtype` is the training script's (`float32`), the stored arrays are fp32 always."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    """First parameter in the flat vector, a multiple of 16."""

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
        return self.start + _padded(self.params, TENSOR_ALIGNMENT)


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
        """Bytes of one array's extent."""
        return self.params * FP32.bytes


@dataclass(frozen=True)
class Manifest:
    """Tensors in order and the extent length in parameters (a multiple of 1024). Use `pack`."""

    tensors: tuple[TensorEntry, ...]
    extent_params: int

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, tuple[int, ...], str]], extent_params: int) -> Self:
        """Lay out (name, shape, dtype) one after another. Raises AlignmentError, ShapeError."""
        if extent_params <= 0 or extent_params % EXTENT_ALIGNMENT:
            raise AlignmentError(
                f"extent_params must be a positive multiple of {EXTENT_ALIGNMENT}, not {extent_params!r}"
            )
        entries: list[TensorEntry] = []
        for name, shape, dtype in tensors:
            entries.append(TensorEntry(name, tuple(shape), dtype, entries[-1].stop if entries else 0))
        if not entries or entries[-1].stop == 0:
            raise ShapeError("the parameters must have at least one element, not none; pass trainable tensors")
        return cls(tuple(entries), extent_params)

    @property
    def params(self) -> int:
        """Length of the flat vector, padding included: a multiple of 1024."""
        return _padded(self.tensors[-1].stop, EXTENT_ALIGNMENT)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The extents in order; the last one may be shorter."""
        starts = range(0, self.params, self.extent_params)
        return tuple(Extent(i, s, min(self.extent_params, self.params - s)) for i, s in enumerate(starts))

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
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain values for the state file."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        entries = (TensorEntry(t["name"], tuple(t["shape"]), t["dtype"], t["start"]) for t in body["tensors"])
        return cls(tuple(entries), body["extent_params"])
