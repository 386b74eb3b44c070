"""Compressed weights that cross a link as they are stored and are expanded on its far side, where they are used.

    host: stored bytes ──checked, rows or blocks found──► stored bytes | their table ──link──► far memory ──► dense

The far side is a GPU, or a memory of a processor apart from the host's, in which compiled loops expand. What crosses is
the same for both. Source: Endor (arXiv 2406.11674), which sends bitmaps to the GPU.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.bitmap import HEADER_BYTES, SCALE_COLUMNS, BitmapHeader, ElementFormat
from nearflash.abi.coded import CodedHeader
from nearflash.abi.errors import StreamError
from nearflash.device.backends.host.coded import read_table
from nearflash.device.backends.host.vector import coded, rows
from nearflash.device.drivers.expand import stream_header
from nearflash.weights.expand import ELEMENTS, unpack_header
from nearflash.weights.file import WeightsTensor
from nearflash.weights.groups import expand_groups, group_bytes
from nearflash.weights.weights_map import KeptTensor

__all__ = ["CheckedTensor", "check_stored", "crosses_as_stored", "crossing_bytes", "expand_far",
           "expand_groups_in_torch", "table_bytes"]  # fmt: skip

_FAR_FORMS = {"bitmap": 2, "coded": 4, "int8": 2, "int4": 2}
"""That the far side expands, and what their addresses are multiples of there. Bytes in rANS the host expands, so that
they cross dense."""
_AT_ONCE = 1 << 21
"""Elements of groups that torch expands at once: what it needs in between is of these alone."""


def crosses_as_stored(tensor: WeightsTensor) -> bool:
    """Whether the far side of a link gets a tensor's stored bytes, not its dense elements."""
    if tensor.form not in _FAR_FORMS or tensor.dtype not in ELEMENTS or tensor.expander is not None:
        return False
    return tensor.offset % _FAR_FORMS[tensor.form] == 0


def crossing_bytes(tensor: WeightsTensor) -> int:
    """Bytes that cross the link for a tensor, as often as it is used. Raises WeightsError for a damaged one."""
    if not crosses_as_stored(tensor):
        return tensor.dense_bytes
    return tensor.stored_bytes + table_bytes(tensor)


def table_bytes(tensor: WeightsTensor) -> int:
    """Bytes of the table that goes with stored bytes, by their header; none of groups. Raises WeightsError."""
    if tensor.form not in ("bitmap", "coded"):
        return 0
    begin = tensor if isinstance(tensor, KeptTensor) else replace(tensor, stored_bytes=HEADER_BYTES)
    try:
        header = stream_header(begin.load()[:HEADER_BYTES].tobytes(), tensor.stored_bytes)
    except StreamError as error:
        raise tensor.error(error) from error
    if isinstance(header, CodedHeader):
        numbers = header.blocks * coded.TABLE_COLUMNS
    else:
        numbers = header.rows * rows.TABLE_COLUMNS
    return numbers * np.dtype(np.int64).itemsize


@dataclass(frozen=True)
class CheckedTensor:
    """A tensor whose stored bytes were found right; `table` int64 goes with them, a line for each row of a bitmap
    matrix, (rows, 4), or block of coded weights, (blocks, 8); empty for groups.
    """

    tensor: WeightsTensor
    header: BitmapHeader | CodedHeader | None
    table: NDArray[np.int64]


def check_stored(tensor: WeightsTensor, data: NDArray[np.uint8]) -> CheckedTensor:
    """The rows or blocks of stored bytes, whose checksums are compared. Raises WeightsError for damaged ones."""
    if tensor.form not in ("bitmap", "coded"):
        return CheckedTensor(tensor, None, np.empty((0, rows.TABLE_COLUMNS), np.int64))
    try:
        header = unpack_header(tensor, data)
        return CheckedTensor(tensor, header, read_table(data, header))
    except StreamError as error:
        raise tensor.error(error) from error


def expand_far(checked: CheckedTensor, data: Tensor, table: Tensor, out: Tensor) -> None:
    """Write the dense tensor to `out`, of its shape and dtype, contiguous. All are of the far memory: data (bytes,)
    uint8, table int64 as of CheckedTensor. Raises WeightsError for groups of another length.
    """
    tensor, header = checked.tensor, checked.header
    if header is None:
        element, bits = ELEMENTS[tensor.dtype], int(tensor.form.removeprefix("int"))
        matrix = out.view(torch.int16).view(-1, tensor.shape[-1])
        try:
            if out.device.type == "cpu":
                expand_groups(data.numpy(), matrix.numpy().view(np.uint16), bits, element)
            else:
                expand_groups_in_torch(data, matrix, bits, element)
        except StreamError as error:
            raise tensor.error(error) from error
    elif out.device.type != "cpu":
        from nearflash.weights.gpu import expand_on_gpu

        expand_on_gpu(data, table, header, tuple(out.shape), out)
    elif isinstance(header, CodedHeader):
        patterns = out.view(torch.int16).view(-1).numpy().view(np.uint16)
        coded.expand_blocks(data.numpy(), header, table.numpy(), patterns)
    else:
        rows.expand_rows(data.numpy(), header, table.numpy(), out.view(torch.uint8).view(header.rows, -1).numpy())


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
