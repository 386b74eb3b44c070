"""Marks of parameters whose values are on flash, and in memory only while their block runs.

Outside its block such a tensor has its shape and dtype, and one NaN for all of its elements: a use that nobody foresaw
gives NaN, which a step rejects, and never old values.
"""

from collections.abc import Callable

import torch

__all__ = ["find_values", "is_streamed", "mark_streamed", "placeholder", "unmark"]

_MARK = "_nearflash_values"


def mark_streamed(tensor: torch.Tensor, values: Callable[[], torch.Tensor]) -> None:
    """values: gives those of the tensor, of its shape and dtype, in memory of their own."""
    setattr(tensor, _MARK, values)


def unmark(tensor: torch.Tensor) -> None:
    """It holds its values by itself again."""
    if is_streamed(tensor):
        delattr(tensor, _MARK)


def is_streamed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory does not hold its values."""
    return hasattr(tensor, _MARK)


def find_values(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor's values, wherever they are. Raises StateError."""
    values = getattr(tensor, _MARK, None)
    found: torch.Tensor = tensor.detach() if values is None else values()
    return found


def placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """Make what a streamed tensor holds outside its block."""
    filling = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), filling, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
