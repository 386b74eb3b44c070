"""Compressed weights expanded on a GPU: found and checked on the host, copied as they are stored, expanded there."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.bitmap import BitmapHeader, ElementFormat
from nearflash.abi.errors import FormatError, ShapeError
from nearflash.device.backends.host.matrix import read_rows
from nearflash.weights.gpu_kernels import expand_rows

__all__ = ["expand_stream", "on_gpu", "to_gpu"]

_DTYPES = {ElementFormat.FP16: torch.float16, ElementFormat.BF16: torch.bfloat16, ElementFormat.INT8: torch.int8}


def expand_stream(
    data: NDArray[np.uint8], header: BitmapHeader, shape: tuple[int, ...], out: Tensor | None, device: Any
) -> Tensor:
    """The dense tensor of a bitmap matrix, on `device` or in `out`. Raises StreamError before anything is copied."""
    stream, starts = on_gpu(data, device if out is None else out.device)
    out = _target(shape, _DTYPES[header.dense], out, device)
    expand_rows(stream, starts, header, out.view(header.rows, header.columns))
    return out


def on_gpu(data: NDArray[np.uint8], device: Any) -> tuple[Tensor, Tensor]:
    """Stream and starts on `device`, as expand_rows takes them. Raises StreamError before anything is copied."""
    starts = torch.from_numpy(np.concatenate([rows.table for rows in read_rows(data)]))
    stream = torch.from_numpy(data if data.flags.writeable else data.copy())  # torch warns of read-only memory
    return stream.to(device), starts.to(device)


def to_gpu(found: NDArray[Any], dtype: str, out: Tensor | None, device: Any) -> Tensor:
    """A dense array as a tensor on `device` or in `out`; dtype: as a file names it, BF16 for patterns."""
    tensor = torch.from_numpy(found)
    tensor = tensor.view(torch.bfloat16) if dtype == "BF16" else tensor
    if out is None:
        return tensor.to(device)
    return _target(tuple(tensor.shape), tensor.dtype, out, device).copy_(tensor)


def _target(shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None, device: Any) -> Tensor:
    """`out`, or a tensor made for it. Raises ShapeError, FormatError."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != shape or not out.is_contiguous():
        raise ShapeError(f"out must be contiguous and have the shape {shape}, not {tuple(out.shape)}")
    if out.dtype != dtype:
        raise FormatError(f"out must be of {dtype}, not {out.dtype}")
    return out
