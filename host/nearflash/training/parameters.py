"""torch tensors as ranges of the flat parameter vector that the state file stores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.commands import CopyFormat
from nearflash.abi.errors import FormatError, NonFiniteError, ShapeError
from nearflash.storage import Extent, Manifest, TensorEntry

__all__ = ["COPY_OF", "FlatParameters", "Piece"]

COPY_OF = {torch.float16: CopyFormat.FP16, torch.bfloat16: CopyFormat.BF16, torch.float32: CopyFormat.NONE}
"""What the device makes for tensors of a dtype: their low-precision copy, or nothing beside fp32."""
_DTYPE_OF = {copy: dtype for dtype, copy in COPY_OF.items()}


@dataclass(frozen=True)
class Piece:
    """Elements [first, first + length) of a tensor, at `position` in the flat vector."""

    tensor: int
    first: int
    length: int
    position: int


class FlatParameters:
    """The tensors of all parameter groups, in order, each once, and a host copy of their next values.

    `copy` is the low-precision format that the device makes; tensors are of that dtype or fp32.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], copy: CopyFormat, extent_params: int) -> None:
        """Raises FormatError for a dtype that is neither fp32 nor the copy's, AlignmentError, ShapeError."""
        self.tensors: list[torch.Tensor] = []
        self.group_of: list[int] = []
        names: list[str] = []
        known: set[int] = set()
        for group_index, group in enumerate(groups):
            given = group.get("param_names", [f"{group_index}.{i}" for i in range(len(group["params"]))])
            for name, tensor in zip(given, group["params"], strict=True):
                # torch warns of a tensor that is twice in a group; here, too, it has one state.
                if id(tensor) not in known:
                    known.add(id(tensor))
                    self.tensors.append(tensor)
                    self.group_of.append(group_index)
                    names.append(name)
        for name, tensor in zip(names, self.tensors, strict=True):
            if COPY_OF.get(tensor.dtype) not in (CopyFormat.NONE, copy):
                allowed = "float32" + (f" or {copy.name.lower()}" if copy else ' (or pass copy="fp16" or "bf16")')
                raise FormatError(f"parameter {name!r} must be {allowed}, not {_dtype(tensor)}")
        described = zip(names, self.tensors, strict=True)
        self.manifest = Manifest.pack([(n, tuple(t.shape), _dtype(t)) for n, t in described], extent_params)
        pinned = any(tensor.is_cuda for tensor in self.tensors)
        self._next = [torch.empty(t.numel(), dtype=t.dtype, pin_memory=pinned) for t in self.tensors]
        self._versions: list[int] = []
        self.note_versions()

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Manifest entries, by tensor."""
        return self.manifest.tensors

    def copy_format(self, tensor: int) -> CopyFormat:
        """What the device returns for a tensor: its fp32 parameters (NONE) or a low-precision copy."""
        return COPY_OF[self.tensors[tensor].dtype]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The tensors' elements inside [start, stop) of the flat vector."""
        for index, entry in enumerate(self.entries):
            first, last = max(start, entry.start), min(stop, entry.start + entry.params)
            if first < last:
                yield Piece(index, first - entry.start, last - first, first)

    # From the tensors

    def check_gradients(self) -> list[int]:
        """Tensors that have a gradient. Raises ShapeError, FormatError, NonFiniteError; nothing has changed then."""
        gradients = {i: tensor.grad for i, tensor in enumerate(self.tensors) if tensor.grad is not None}
        for index, (tensor, entry) in enumerate(zip(self.tensors, self.entries, strict=True)):
            if tuple(tensor.shape) != entry.shape:
                raise ShapeError(
                    f"parameter {entry.name!r} must have the shape {entry.shape}, not {tuple(tensor.shape)}"
                )
            if _dtype(tensor) != entry.dtype:
                raise FormatError(f"parameter {entry.name!r} must be {entry.dtype}, not {_dtype(tensor)}")
            if index in gradients:
                _check_gradient(gradients[index], entry)
        counts = {self.entries[i].name: _nonfinite(gradient) for i, gradient in gradients.items()}
        damaged = [name for name, count in counts.items() if count]
        if damaged:
            raise NonFiniteError(
                f"gradient of {damaged[0]!r} must be finite, not NaN or infinite in {counts[damaged[0]]} elements "
                f"({sum(counts.values())} in {len(damaged)} tensors); nothing was updated: skip this step"
            )
        return list(gradients)

    def put_gradients(self, start: int, stop: int, out: NDArray[np.float32]) -> None:
        """Write the gradients of [start, stop), fp32, into `out`; padding becomes zero."""
        out[:] = 0
        target = torch.from_numpy(out)
        for piece in self.pieces(start, stop):
            gradient = self.tensors[piece.tensor].grad
            assert gradient is not None, "runs hold tensors with gradients only"
            values = gradient.reshape(-1)[piece.first : piece.first + piece.length]
            target[piece.position - start :][: piece.length].copy_(values)

    def put_parameters(self, extent: Extent, out: NDArray[np.float32]) -> None:
        """Write the tensors' present values, fp32, into `out` (one extent); padding becomes zero."""
        out[:] = 0
        target = torch.from_numpy(out)
        for piece in self.pieces(extent.start, extent.stop):
            values = self.tensors[piece.tensor].detach().reshape(-1)[piece.first : piece.first + piece.length]
            target[piece.position - extent.start :][: piece.length].copy_(values)

    # To the tensors

    def stage(self, start: int, stop: int, source: NDArray[np.uint8], copy: CopyFormat) -> None:
        """Keep the new values of [start, stop): bytes in fp32 (then rounded to the tensor's dtype) or `copy`."""
        values = torch.from_numpy(source).view(_DTYPE_OF[copy])
        for piece in self.pieces(start, stop):
            target = self._next[piece.tensor][piece.first : piece.first + piece.length]
            target.copy_(values[piece.position - start :][: piece.length])

    def publish(self, tensors: Sequence[int]) -> None:
        """Copy the staged values into the tensors, in place."""
        with torch.no_grad():
            for index in tensors:
                tensor = self.tensors[index]
                tensor.copy_(self._next[index].view(tensor.shape))
        self.note_versions()

    # Changes from outside

    def note_versions(self) -> None:
        """Take the tensors' present contents as known."""
        self._versions = [tensor._version for tensor in self.tensors]

    def changed(self) -> list[str]:
        """Names of tensors that were changed in place by others (as far as torch counts versions)."""
        versions = zip(self.entries, self.tensors, self._versions, strict=True)
        return [entry.name for entry, tensor, known in versions if tensor._version != known]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_gradient(gradient: torch.Tensor, entry: TensorEntry) -> None:
    if gradient.layout is not torch.strided or not gradient.dtype.is_floating_point:
        raise FormatError(
            f"gradient of {entry.name!r} must be dense and floating point, not {gradient.layout} {gradient.dtype}"
        )
    if tuple(gradient.shape) != entry.shape:
        raise ShapeError(f"gradient of {entry.name!r} must have the shape {entry.shape}, not {tuple(gradient.shape)}")


def _nonfinite(gradient: torch.Tensor) -> int:
    finite = torch.isfinite(gradient)
    return 0 if bool(finite.all()) else int(torch.count_nonzero(~finite))
