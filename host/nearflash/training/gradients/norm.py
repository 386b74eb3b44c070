"""What a step must know of all gradients before it may touch anything: that they are sound, and their norm.

The norm is the root of the sum of squares, in fp64: of each 1,024 elements of a tensor by halves (the first
half plus the second, until one is left), then of all those sums exactly (math.fsum). On CPU it depends neither on the
number of threads nor on the devices. Tensors on a GPU sum their squares there, 2^22 elements at a time.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import FormatError, NonFiniteError, ShapeError
from nearflash.abi.formats import fp32_round
from nearflash.device.backends.host.vector.compiled import bf16_number, compiled
from nearflash.device.threads import set_ieee_arithmetic
from nearflash.storage import TensorEntry
from nearflash.training.step.parameters import FlatParameters, dtype_name

__all__ = ["clip_scalar", "reject_nonfinite", "sum_of_squares", "tensors_with_gradient"]

RUN = 1 << 10
BLOCK = 1 << 20
"""Elements that a thread takes at once."""
GPU_BLOCK = 1 << 22


def tensors_with_gradient(flat: FlatParameters) -> list[int]:
    """Tensors that have a gradient, ascending. Raises ShapeError, FormatError for tensors or gradients that changed."""
    found = []
    for index, (tensor, entry) in enumerate(zip(flat.tensors, flat.entries, strict=True)):
        if tuple(tensor.shape) != entry.shape:
            raise ShapeError(f"parameter {entry.name!r} must have the shape {entry.shape}, not {tuple(tensor.shape)}")
        if dtype_name(tensor) != entry.dtype:
            raise FormatError(f"parameter {entry.name!r} must be {entry.dtype}, not {dtype_name(tensor)}")
        if tensor.grad is not None:
            _check_gradient(tensor.grad, entry)
            found.append(index)
    return found


def sum_of_squares(gradients: Iterable[torch.Tensor]) -> float:
    """Sum of the squares of the gradients, each first rounded to fp32; not finite where one of them is not."""
    sums: list[float] = []
    blocks: list[torch.Tensor] = []
    for gradient in gradients:
        values = gradient.detach().reshape(-1)
        if values.is_cuda:
            parts = [part.float().double().square().sum() for part in values.split(GPU_BLOCK)]
            sums += torch.stack(parts).tolist() if parts else []
        else:
            blocks += values.split(BLOCK)
    with ThreadPoolExecutor(os.cpu_count(), initializer=set_ieee_arithmetic) as pool:
        for runs in pool.map(_sums, blocks):
            sums += runs.tolist()
    total = sum(sums)
    return math.fsum(sums) if math.isfinite(total) else total


def clip_scalar(norm: float, max_norm: float | None, scale: float) -> float:
    """What gradients are multiplied by, fp32: 1 / (clip·scale), clip = max(1, (norm/scale + 1e-6) / max_norm).

    norm: of the gradients as they are, scaled. Source: ZeRO's unscale_and_clip_grads, torch's clip_grad_norm_.
    """
    clip = 1.0 if max_norm is None else max(1.0, (norm / scale + 1e-6) / max_norm)
    return fp32_round(1.0 / (clip * scale))


def reject_nonfinite(flat: FlatParameters, tensors: Sequence[int]) -> None:
    """Raise NonFiniteError, with the first damaged tensor's name and the counts."""
    counts = {flat.entries[i].name: _nonfinite(flat.tensors[i].grad) for i in tensors}
    damaged = [name for name, count in counts.items() if count]
    if not damaged:
        raise NonFiniteError("gradients must be finite, but another rank has some that are not; nothing was updated")
    raise NonFiniteError(
        f"gradient of {damaged[0]!r} must be finite, not NaN or infinite in {counts[damaged[0]]} elements "
        f"({sum(counts.values())} in {len(damaged)} tensors); nothing was updated: skip this step, or pass loss_scale"
    )


def _sums(block: torch.Tensor) -> NDArray[np.float64]:
    """Sums of the squares of each run of a block."""
    bf16 = block.dtype is torch.bfloat16
    values = (block.contiguous().view(torch.int16) if bf16 else block.float()).numpy()
    sums = np.empty(-(-values.size // RUN), np.float64)
    _run_sums(bf16)(values, sums)
    return sums


@cache
def _run_sums(bf16: bool) -> Callable[..., None]:
    """The loop, of fp32 numbers or of bf16 patterns."""
    eighth = RUN // 8

    @compiled
    def square(value: Any) -> Any:
        wide = np.float64(bf16_number(value) if bf16 else value)
        return wide * wide

    def loop(values: Any, sums: Any) -> None:
        full, part = np.empty(RUN, values.dtype), np.empty(eighth, np.float64)
        for run in range(sums.size):
            x = values[run * RUN : (run + 1) * RUN]
            if x.size < RUN:
                full[: x.size] = x
                full[x.size :] = 0
                x = full
            # The first three halvings at once, in registers.
            for i in range(eighth):
                a, b, c = square(x[i]), square(x[i + eighth]), square(x[i + 2 * eighth])
                d, e, f = square(x[i + 3 * eighth]), square(x[i + 4 * eighth]), square(x[i + 5 * eighth])
                g, h = square(x[i + 6 * eighth]), square(x[i + 7 * eighth])
                part[i] = ((a + e) + (c + g)) + ((b + f) + (d + h))
            half = eighth // 2
            while half:
                for i in range(half):
                    part[i] += part[half + i]
                half //= 2
            sums[run] = part[0]

    return compiled(loop)


def _check_gradient(gradient: torch.Tensor, entry: TensorEntry) -> None:
    if gradient.layout is not torch.strided or not gradient.dtype.is_floating_point:
        raise FormatError(
            f"gradient of {entry.name!r} must be dense and floating point, not {gradient.layout} {gradient.dtype}"
        )
    if tuple(gradient.shape) != entry.shape:
        raise ShapeError(f"gradient of {entry.name!r} must have the shape {entry.shape}, not {tuple(gradient.shape)}")


def _nonfinite(gradient: torch.Tensor | None) -> int:
    assert gradient is not None, "only tensors with a gradient are looked at"
    return int(torch.count_nonzero(~torch.isfinite(gradient.float())))
