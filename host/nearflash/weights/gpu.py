"""Compressed weights expanded on a GPU: found and checked on the host, copied as they are stored, expanded there."""

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.bitmap import BitmapHeader, ElementFormat
from nearflash.abi.coded import CodedHeader
from nearflash.device.backends.host.coded import read_table
from nearflash.weights.gpu_coded import expand_blocks
from nearflash.weights.gpu_kernels import expand_rows, make_target

__all__ = ["GpuHeader", "expand_on_gpu", "expand_stream", "on_gpu", "to_gpu"]

GpuHeader: TypeAlias = BitmapHeader | CodedHeader
"""Of a stream that a GPU expands."""
_DTYPES = {ElementFormat.FP16: torch.float16, ElementFormat.BF16: torch.bfloat16, ElementFormat.INT8: torch.int8}


def expand_stream(
    data: NDArray[np.uint8], header: GpuHeader, shape: tuple[int, ...], out: Tensor | None, device: Any
) -> Tensor:
    """The dense tensor of a bitmap matrix or of coded weights, on `device` or in `out`.

    Raises StreamError before anything is copied.
    """
    stream, table = on_gpu(data, header, device if out is None else out.device)
    return expand_on_gpu(stream, table, header, shape, out)


def on_gpu(data: NDArray[np.uint8], header: GpuHeader, device: Any) -> tuple[Tensor, Tensor]:
    """Stream and the table of its rows or blocks on `device`, as expand_on_gpu takes them.

    Raises StreamError before anything is copied.
    """
    table = torch.from_numpy(read_table(data, header))
    stream = torch.from_numpy(data if data.flags.writeable else data.copy())  # torch warns of read-only memory
    return stream.to(device), table.to(device)


def expand_on_gpu(
    stream: Tensor, table: Tensor, header: GpuHeader, shape: tuple[int, ...], out: Tensor | None = None
) -> Tensor:
    """The dense tensor of a stream that lies on a GPU, written to `out`, contiguous, where given.

    stream: uint8 (bytes,), at an address that is a multiple of 4. Raises ShapeError, FormatError for another `out`.
    """
    out = make_target(shape, _DTYPES[header.dense], out, stream.device)
    if isinstance(header, CodedHeader):
        expand_blocks(stream, table, header, out.view(-1))
    else:
        expand_rows(stream, table, header, out.view(header.rows, header.columns))
    return out


def to_gpu(found: NDArray[Any], dtype: str, out: Tensor | None, device: Any) -> Tensor:
    """A dense array as a tensor on `device` or in `out`; dtype: as a file names it, BF16 for patterns."""
    tensor = torch.from_numpy(found)
    tensor = tensor.view(torch.bfloat16) if dtype == "BF16" else tensor
    if out is None:
        return tensor.to(device)
    return make_target(tuple(tensor.shape), tensor.dtype, out, device).copy_(tensor)
