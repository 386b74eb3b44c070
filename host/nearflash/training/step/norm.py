"""Checks of all gradients before a step may touch anything: that they are sound, and their norm.

The norm is the root of the sum of squares, in fp64: of each 1,024 elements of a tensor by halves (the first
half plus the second, until one is left), then of all those sums exactly (math.fsum). On CPU it depends neither on the
number of threads nor on the devices. Tensors on a GPU sum their squares there, 2^22 elements at a time.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import FormatError, NonFiniteError, ShapeError
from nearflash.abi.formats import fp32_round
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import aligned_buffer
from nearflash.support.native import find_address
from nearflash.support.threads import set_ieee_arithmetic
from nearflash.training.step.fingerprint import KEYS, MODULUS, RUN, fingerprint
from nearflash.training.step.host_memory import load_tensor_loops
from nearflash.training.step.parameters import FlatParameters, dtype_name
from nearflash.training.step.requirements import check_gradient

__all__ = [
    "clip_scalar", "reject_nonfinite", "square_runs", "squares_and_fingerprints", "sum_of_squares",
    "tensors_with_gradient",
]  # fmt: skip

BLOCK = 1 << 20
"""Elements that a thread takes at once."""
GPU_BLOCK = 1 << 22


def tensors_with_gradient(flat: FlatParameters) -> list[int]:
    """Tensors that have a gradient, ascending.

    Raises ShapeError, FormatError, CommandError for tensors or gradients that changed.
    """
    indices = []
    for index, (tensor, entry) in enumerate(zip(flat.tensors, flat.entries, strict=True)):
        if tuple(tensor.shape) != entry.shape:
            raise ShapeError(f"parameter {entry.name!r} must have the shape {entry.shape}, not {tuple(tensor.shape)}")
        if dtype_name(tensor) != entry.dtype:
            raise FormatError(f"parameter {entry.name!r} must be {entry.dtype}, not {dtype_name(tensor)}")
        if tensor.grad is not None:
            check_gradient(entry.name, tensor.grad, entry.shape)
        if flat.has_gradient(index):
            indices.append(index)
    flat.check_memory()
    return indices


def sum_of_squares(gradients: Iterable[torch.Tensor]) -> float:
    """Sum of the squares of the gradients, each first rounded to fp32; not finite where one of them is not."""
    return squares_and_fingerprints(gradients, marked=False)[0]


def square_runs(gradient: torch.Tensor) -> list[NDArray[np.float64]]:
    """Sums of the squares of each 1,024 elements of a gradient in host memory, or of a part that begins with a run."""
    values = gradient.detach().reshape(-1)
    squares = np.empty(-(-values.numel() // RUN), np.float64)
    for offset, part in enumerate(values.split(BLOCK)):
        _sums(False, squares, (0, 0, part, offset * (BLOCK // RUN)))
    return [squares]


def squares_and_fingerprints(
    gradients: Iterable[torch.Tensor], *, marked: bool = True, more: Iterable[NDArray[np.float64]] = ()
) -> tuple[float, list[int]]:
    """As sum_of_squares; beside it, of each gradient, the fingerprint of its values in fp32, from the same pass.

    Not `marked`: fingerprints are 0. more: sums of squares of other gradients, which count as well.
    """
    sums: list[NDArray[np.float64]] = list(more)
    marks: list[int] = []
    blocks: list[tuple[int, int, torch.Tensor, int]] = []
    runs = 0
    for index, gradient in enumerate(gradients):
        values = gradient.detach().reshape(-1).resolve_neg()
        marks.append(0)
        if values.is_cuda:
            for start in range(0, values.numel(), GPU_BLOCK):
                part = values[start : start + GPU_BLOCK].float()
                sums.append(np.array([float(part.double().square().sum())]))
                marks[index] += fingerprint(part, start) if marked else 0
        else:
            for offset, part in enumerate(values.split(BLOCK)):
                blocks.append((index, offset, part, runs))
                runs += -(-part.numel() // RUN)
    # One mapping, which goes back to the system: what threads and the allocator keep would grow with the model.
    squares = aligned_buffer((runs * 8 // BLOCK_BYTES + 1) * BLOCK_BYTES)[: runs * 8].view(np.float64)
    sums.append(squares)
    with ThreadPoolExecutor(os.cpu_count(), initializer=set_ieee_arithmetic) as pool:
        for (index, _, _, _), mark in zip(blocks, pool.map(partial(_sums, marked, squares), blocks), strict=True):
            marks[index] += mark
    total = sum(float(part.sum()) for part in sums)
    exact = math.fsum(_numbers(sums)) if math.isfinite(total) else total
    return exact, [mark % MODULUS for mark in marks]


def clip_scalar(norm: float, max_norm: float | None, scale: float) -> float:
    """Factor for gradients, fp32: 1 / (clip·scale), clip = max(1, (norm/scale + 1e-6) / max_norm).

    norm: of the gradients as they are, scaled. Source: ZeRO's unscale_and_clip_grads, torch's clip_grad_norm_.
    """
    clip = 1.0 if max_norm is None else max(1.0, (norm / scale + 1e-6) / max_norm)
    return fp32_round(1.0 / (clip * scale))


def reject_nonfinite(flat: FlatParameters, tensors: Sequence[int]) -> None:
    """Raise NonFiniteError, with the first damaged tensor's name and the counts."""
    counts = {flat.entries[i].name: sum(map(_count_nonfinite, flat.gradient_parts(i))) for i in tensors}
    damaged = [name for name, count in counts.items() if count]
    if not damaged:
        raise NonFiniteError("gradients must be finite, but another rank has some that are not; nothing was updated")
    raise NonFiniteError(
        f"gradient of {damaged[0]!r} must be finite, not NaN or infinite in {counts[damaged[0]]} elements "
        f"({sum(counts.values())} in {len(damaged)} tensors); nothing was updated: skip this step, or pass loss_scale"
    )


def _numbers(sums: Iterable[NDArray[np.float64]]) -> Iterator[float]:
    """Every number, as Python has them; few of them at a time."""
    few = BLOCK // RUN
    return chain.from_iterable(part[at : at + few].tolist() for part in sums for at in range(0, len(part), few))


def _sums(marked: bool, squares: NDArray[np.float64], block: tuple[int, int, torch.Tensor, int]) -> int:
    """Write the sums of the squares of each run of a block; returns its part of the tensor's fingerprint.

    block: the tensor's index, the block's number in it, its values, and the place of its first run in `squares`.
    """
    _, offset, part, first = block
    if not part.numel():
        return 0
    bf16 = part.dtype is torch.bfloat16
    values = (part.contiguous().view(torch.int16) if bf16 else part.float().contiguous()).numpy()
    loop = load_tensor_loops().sum_bf16s if bf16 else load_tensor_loops().sum_floats
    keys = find_address(KEYS) if marked else None
    out = find_address(squares[first:])
    mark = int(loop(find_address(values), values.size, keys, offset * (BLOCK // RUN), out))
    return mark << 16 if bf16 else mark  # an fp32 number has bf16's bits above 16 zeros


def _count_nonfinite(gradient: torch.Tensor) -> int:
    return int(torch.count_nonzero(~torch.isfinite(gradient.float())))
