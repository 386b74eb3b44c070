"""Residual that compression left out, between two steps: exact, or in 4 bits."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import StateError

__all__ = ["BLOCK_PARAMS", "ExactResidual", "QuantizedResidual", "Residual"]

BLOCK_PARAMS = 16
"""Parameters that share a scale; ranges begin and end at multiples of it."""
_LARGEST = 7


class Residual(Protocol):
    """One value for each of n parameters, zero at first; `start` and lengths are multiples of BLOCK_PARAMS."""

    def add(self, start: int, values: torch.Tensor) -> torch.Tensor:
        """Sums of values (n,) and what is held of [start, start + n), fp32, in new memory."""

    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """fp32 values as they will be held, for `write`."""

    def slices(self, start: int, params: int) -> list[torch.Tensor]:
        """Views of what is held of [start, start + params), in the form that `pack` gives."""

    def write(self, start: int, packed: tuple[torch.Tensor, ...]) -> None:
        """Hold what `pack` gave."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Held arrays by name, for the state; on the CPU these are views."""

    def after(self, start: int, params: int, packed: Mapping[int, tuple[torch.Tensor, ...]]) -> dict[str, NDArray[Any]]:
        """Copy what `arrays` would have of [start, start + params), had what `packed` has by start been written."""

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Hold what `arrays` gave. Raises StateError for other names or sizes."""


class _Held:
    """Tensors by name, of which each parameter has as many elements as every other."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], params: int) -> None:
        self._tensors, self._params = dict(tensors), params

    def slices(self, start: int, params: int) -> list[torch.Tensor]:
        """Views of what is held of [start, start + params), in the form that `pack` gives."""
        return [
            tensor[start * tensor.numel() // self._params : (start + params) * tensor.numel() // self._params]
            for tensor in self._tensors.values()
        ]

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {name: tensor.cpu().numpy() for name, tensor in self._tensors.items()}

    def after(self, start: int, params: int, packed: Mapping[int, tuple[torch.Tensor, ...]]) -> dict[str, NDArray[Any]]:
        parts = [part.to("cpu", copy=True) for part in self.slices(start, params)]
        for first, tensors in packed.items():
            for part, new in zip(parts, tensors, strict=True):
                offset = (first - start) * part.numel() // params
                part[offset : offset + new.numel()] = new.to("cpu")
        return {name: part.numpy() for name, part in zip(self._tensors, parts, strict=True)}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        mine = {name: tensor.numel() for name, tensor in self._tensors.items()}
        theirs = {name: array.size for name, array in arrays.items()}
        if mine != theirs:
            raise StateError(f"the residual must consist of {mine}, not of {theirs}; use the compression it is from")
        for name, tensor in self._tensors.items():
            tensor.copy_(torch.from_numpy(np.array(arrays[name])))


class ExactResidual(_Held):
    """fp32 values of `params` parameters on a torch device."""

    def __init__(self, params: int, device: torch.device) -> None:
        super().__init__({"residual": torch.zeros(params, device=device)}, params)

    def add(self, start: int, values: torch.Tensor) -> torch.Tensor:
        """Sums of values (n,) and what is held of [start, start + n), fp32, in new memory."""
        return self.slices(start, values.numel())[0] + values

    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """fp32 values as they will be held, for `write`."""
        return (values,)

    def write(self, start: int, packed: tuple[torch.Tensor, ...]) -> None:
        """Hold what `pack` gave."""
        self.slices(start, packed[0].numel())[0].copy_(packed[0])


class QuantizedResidual(_Held):
    """4-bit values of `params` parameters (a multiple of BLOCK_PARAMS): q · scale, q in -7 .. 7, a bf16 scale a block.

    Values round to nearest even; the error is at most half a scale, 1/14 of a block's largest magnitude.
    """

    def __init__(self, params: int, device: torch.device) -> None:
        nibbles = torch.zeros(params // 2, dtype=torch.uint8, device=device)
        scales = torch.zeros(params // BLOCK_PARAMS, dtype=torch.int16, device=device)
        super().__init__({"residual": nibbles, "residual_scale": scales}, params)

    def add(self, start: int, values: torch.Tensor) -> torch.Tensor:
        """Sums of values (n,) and what is held of [start, start + n), fp32, in new memory."""
        nibbles, scales = self.slices(start, values.numel())
        both = torch.stack([nibbles & 15, nibbles >> 4], dim=1).to(torch.int8)
        signed = torch.where(both > _LARGEST, both - 16, both).float().view(-1, BLOCK_PARAMS)
        return (signed * scales.view(torch.bfloat16).float()[:, None]).view(-1) + values

    def pack(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """fp32 values as they will be held, for `write`."""
        blocks = values.view(-1, BLOCK_PARAMS)
        scales = (blocks.abs().amax(dim=1) / _LARGEST).bfloat16()
        inverse = torch.where(scales > 0, 1 / scales.float(), 0)
        q = (blocks * inverse[:, None]).round().nan_to_num(0).clamp(-_LARGEST, _LARGEST).to(torch.int8).view(-1, 2) & 15
        return (q[:, 0] | q[:, 1] << 4).view(torch.uint8), scales.view(torch.int16)

    def write(self, start: int, packed: tuple[torch.Tensor, ...]) -> None:
        """Hold what `pack` gave."""
        params = packed[0].numel() * 2
        for held, new in zip(self.slices(start, params), packed, strict=True):
            held.copy_(new)
