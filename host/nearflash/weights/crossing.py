"""Compressed weights that cross a link as they are stored and are expanded on its far side, where they are used.

    host: stored bytes ──checked, their rows found──► stored bytes | table of rows ──link──► far memory ──► dense

The far side is a GPU, or a memory of a processor apart from the host's, in which compiled loops expand. What crosses is
the same for both. Source: Endor (arXiv 2406.11674), which sends bitmaps to the GPU.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.bitmap import HEADER_BYTES, SCALE_COLUMNS, BitmapHeader, ElementFormat
from nearflash.abi.errors import StreamError
from nearflash.device.backends.host.matrix import read_rows
from nearflash.device.backends.host.vector.rows import expand_rows
from nearflash.weights.expand import ELEMENTS, matrix_header
from nearflash.weights.file import WeightsTensor
from nearflash.weights.groups import expand_groups, group_bytes
from nearflash.weights.weights_map import KeptTensor

__all__ = ["ROW_BYTES", "CheckedTensor", "check_stored", "crosses_as_stored", "crossing_bytes", "expand_far",
           "expand_groups_in_torch", "table_rows"]  # fmt: skip

ROW_BYTES = 32
"""Of a row's line in the table of a bitmap matrix: four numbers of 8 bytes (nearflash.weights.gpu_kernels)."""
_FAR_FORMS = ("bitmap", "int8", "int4")
"""That the far side expands. Coded weights, and bytes in rANS, the host expands, so that they cross dense."""
_AT_ONCE = 1 << 21
"""Elements of groups that torch expands at once: what it needs in between is of these alone."""


def crosses_as_stored(tensor: WeightsTensor) -> bool:
    """Whether the far side of a link gets a tensor's stored bytes, not its dense elements."""
    at_word = tensor.offset % 2 == 0  # which a GPU reads
    return tensor.form in _FAR_FORMS and tensor.dtype in ELEMENTS and tensor.expander is None and at_word


def crossing_bytes(tensor: WeightsTensor) -> int:
    """Bytes that cross the link for a tensor, as often as it is used. Raises WeightsError for a damaged one."""
    if not crosses_as_stored(tensor):
        return tensor.dense_bytes
    return tensor.stored_bytes + table_rows(tensor) * ROW_BYTES


def table_rows(tensor: WeightsTensor) -> int:
    """Rows of the table that goes with stored bytes, as their header states; none of groups. Raises WeightsError."""
    if tensor.form != "bitmap":
        return 0
    begin = tensor if isinstance(tensor, KeptTensor) else replace(tensor, stored_bytes=HEADER_BYTES)
    try:
        return BitmapHeader.unpack(begin.load()[:HEADER_BYTES].tobytes(), tensor.stored_bytes).rows
    except StreamError as error:
        raise tensor.error(error) from error


@dataclass(frozen=True)
class CheckedTensor:
    """A tensor whose stored bytes were found right; `table` (rows, 4) int64 goes with them, empty for groups."""

    tensor: WeightsTensor
    header: BitmapHeader | None
    table: NDArray[np.int64]


def check_stored(tensor: WeightsTensor, data: NDArray[np.uint8]) -> CheckedTensor:
    """The rows of stored bytes, whose checksums are compared. Raises WeightsError for damaged ones."""
    if tensor.form != "bitmap":
        return CheckedTensor(tensor, None, np.empty((0, 4), np.int64))
    try:
        header = matrix_header(tensor, data)
        table = np.concatenate([rows.table for rows in read_rows(data)])
    except StreamError as error:
        raise tensor.error(error) from error
    return CheckedTensor(tensor, header, table)


def expand_far(checked: CheckedTensor, data: Tensor, table: Tensor, out: Tensor) -> None:
    """Write the dense tensor to `out`, of its shape and dtype, contiguous. All are of the far memory: data (bytes,)
    uint8, table (rows, 4) int64. Raises WeightsError for groups of another length.
    """
    tensor, header = checked.tensor, checked.header
    if header is None:
        element, bits = ELEMENTS[tensor.dtype], int(tensor.form.removeprefix("int"))
        rows = out.view(torch.int16).view(-1, tensor.shape[-1])
        try:
            if out.device.type == "cpu":
                expand_groups(data.numpy(), rows.numpy().view(np.uint16), bits, element)
            else:
                expand_groups_in_torch(data, rows, bits, element)
        except StreamError as error:
            raise tensor.error(error) from error
    elif out.device.type == "cpu":
        patterns = out.view(torch.uint8).view(header.rows, -1)
        expand_rows(data.numpy(), header, table.numpy(), patterns.numpy())
    else:
        from nearflash.weights.gpu_kernels import expand_rows as expand_on_gpu

        expand_on_gpu(data, table, header, out.view(header.rows, header.columns))


def expand_groups_in_torch(data: Tensor, out: Tensor, bits: int, output: ElementFormat) -> None:
    """As nearflash.weights.groups.expand_groups, by torch where its tensors are: out (rows, columns), int16."""
    rows, columns = out.shape
    scales, _ = group_bytes(len(data), rows, columns, bits)
    dtype = torch.float16 if output is ElementFormat.FP16 else torch.bfloat16
    pairs = data[:scales].view(dtype).view(rows, -1, 2)
    packed = data[scales:].view(rows, -1)
    step = max(_AT_ONCE // columns, 1)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        codes = packed[part]
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        scale, minimum = (
            pairs[part, :, which].float().repeat_interleave(SCALE_COLUMNS, dim=1)[:, :columns] for which in (0, 1)
        )
        total = codes[:, :columns].float() * scale + minimum
        patterns = total.to(dtype).view(torch.int16)
        out[part] = torch.where(total.isnan(), output.number_format.canonical_nan, patterns)
