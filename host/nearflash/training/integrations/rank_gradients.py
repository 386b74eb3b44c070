"""Gradients that ranks must agree on before any of them updates: which tensors have one, and that they are the same."""

import math
from collections.abc import Sequence

import torch

from nearflash.abi.errors import CommandError, FormatError
from nearflash.training.integrations.process_group import Ranks
from nearflash.training.step.norm import sum_of_squares

__all__ = ["agree_on_gradients", "agree_on_norm"]

_SAME = 1e-5
"""Relative difference of two ranks' sums of squares up to which their gradients are the same but for rounding."""


def agree_on_gradients(ranks: Ranks, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of which any rank has the gradient: afterwards all ranks have it, those that lacked it a copy.

    Raises FormatError, on all ranks, for a gradient that no optimizer here takes; nothing was changed then.
    """
    ranks.together(lambda: _check(tensors), "stepping")
    every = ranks.gather([tensor.grad is not None for tensor in tensors])
    active = []
    for tensor, there in zip(tensors, zip(*every, strict=True), strict=True):
        if any(there):
            active.append(tensor)
            if not all(there):
                if tensor.grad is None:
                    tensor.grad = torch.empty_like(tensor)
                ranks.broadcast(tensor.grad, there.index(True))
    return active


def agree_on_norm(ranks: Ranks, tensors: Sequence[torch.Tensor]) -> float:
    """Sum of squares of the tensors' gradients. Raises CommandError, on all ranks, where it is not the same on each."""
    mine = sum_of_squares(tensor.grad for tensor in tensors if tensor.grad is not None)
    totals = ranks.gather_float(mine)
    finite = [total for total in totals if math.isfinite(total)]
    if finite and (len(finite) < len(totals) or max(finite) - min(finite) > _SAME * max(finite)):
        norms = ", ".join(f"{math.sqrt(total) if total >= 0 else total:.6g}" for total in totals)
        raise CommandError(
            f"gradients must be averaged over ranks, the same on each, not of the norms {norms}; nothing was updated: "
            "wrap the model in DistributedDataParallel, or all-reduce each p.grad before the step"
        )
    return mine


def _check(tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if (gradient := tensor.grad) is None:
            continue
        dense = gradient.layout is torch.strided and gradient.dtype.is_floating_point
        if not dense or gradient.shape != tensor.shape:
            raise FormatError(
                f"gradient of tensor {index} must be dense, floating point and of the shape {tuple(tensor.shape)}, not "
                f"{gradient.layout} {gradient.dtype} {tuple(gradient.shape)}; nothing was updated"
            )
