"""Compressed weights expanded: by the host's cores, on a device of the `expand` kernel, or on a GPU."""

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader, ElementFormat, bitmap_error, check_groups
from nearflash.abi.coded import CodedHeader
from nearflash.abi.errors import FormatError, ShapeError, StreamError, UnknownDeviceError
from nearflash.abi.rans import RANS_MAGIC, RansHeader
from nearflash.abi.topk import StreamFault
from nearflash.device import Device, open_device
from nearflash.device.backends.host.coded import expand_coded
from nearflash.device.backends.host.matrix import expand_into
from nearflash.device.drivers.expand import expand_matrix, stream_header
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.weights.file import PackedTensor, WeightsTensor
from nearflash.weights.groups import expand_groups
from nearflash.weights.rans import expand_rans

__all__ = ["ELEMENTS", "expand", "expand_packed", "unpack_header"]

ELEMENTS = {"F16": ElementFormat.FP16, "BF16": ElementFormat.BF16, "I8": ElementFormat.INT8}
"""Formats of tensors that can be compressed."""
_NAMES = {element: dtype for dtype, element in ELEMENTS.items()}
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U16": "<u2", "I64": "<i8", "I32": "<i4",
           "I16": "<i2", "I8": "|i1", "U8": "|u1", "U32": "<u4", "U64": "<u8", "BOOL": "|b1", "F8_E4M3": "|u1",
           "F8_E5M2": "|u1"}  # fmt: skip
"""Of an array with the elements of each dtype of a file."""
_TORCH_NAMES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Of dtypes that numpy lacks."""


def expand(
    source: bytes | WeightsTensor,
    device: str | Device = "host",
    *,
    out: Any = None,
    executor: Executor | None = None,
    memory: Callable[[int], NDArray[np.uint8]] = reuse_buffer,
) -> Any:
    """The dense tensor of a stream that `pack` gave, (rows, columns), or `pack_coded` or `pack_rans`, (elements,), or
    of a tensor in a file, of its own shape.

    Of float16 or int8, or, for bf16, uint16 bit patterns (`torch.from_numpy(found).view(torch.bfloat16)`), as for
    fp8 uint8; of a tensor that was stored dense, of its own dtype. On a GPU, a torch tensor.

    device: `host`, which computes in threads; another name for `open_device`, or an open Device, which stays open; or
    `cuda`, also with a number. All give the same bits; coded weights need a build with their formats. out: a numpy
    array or torch tensor of that shape and dtype (of bf16 uint16 or bfloat16), contiguous; it is written and returned.
    executor: of threads that have set_ieee_arithmetic, for `host`; by default as many as there are processors, for
    large tensors. memory: gives aligned memory of so many bytes, to read a tensor of a file into.

    Raises StreamError for a stream that is damaged and WeightsError for a tensor that is; ShapeError and FormatError
    for another `out`, whose contents are undefined after an error; UnknownDeviceError, and what the device raises.
    """
    if isinstance(source, WeightsTensor):
        try:
            return _expand_tensor(source, out, device, executor, memory)
        except StreamError as error:
            raise source.error(error) from error
    data = np.frombuffer(source, np.uint8)
    if source[: len(RANS_MAGIC)] == RANS_MAGIC:
        rans = RansHeader.unpack(source[:HEADER_BYTES], len(data))
        check_groups(data.data, rans)
        return _expand_rans(data, rans, (rans.elements,), "U8", out, device, executor)
    header = stream_header(source[:HEADER_BYTES], len(data))
    check_groups(data.data, header)
    shape = (header.elements,) if isinstance(header, CodedHeader) else (header.rows, header.columns)
    return _expand_stream(data, header, shape, out, device, executor)


def expand_packed(packed: PackedTensor) -> NDArray[np.uint16]:
    """Patterns, of the tensor's shape, of a packed tensor of fp16 or bf16, by the caller's thread where it is small."""
    out = np.empty(packed.shape, np.uint16)
    if packed.form.startswith("int"):
        rows = out.reshape(-1, packed.shape[-1])
        expand_groups(packed.data, rows, int(packed.form.removeprefix("int")), ELEMENTS[packed.dtype])
        return out
    values = packed.data if packed.form == "dense" else expand(packed.data.tobytes())
    out[:] = values.view(np.uint16).reshape(packed.shape)
    return out


def _expand_tensor(
    tensor: WeightsTensor,
    out: Any,
    device: str | Device,
    executor: Executor | None,
    memory: Callable[[int], NDArray[np.uint8]],
) -> Any:
    if not tensor.is_expanded_by_host and tensor.expander is not None:
        on_gpu = _on_gpu(out, device)
        values = _target(out, tensor.shape, tensor.dtype, on_gpu=on_gpu)
        tensor.expander.expand(tensor, values)
        return _hand_over(values, tensor.dtype, out, device, on_gpu=on_gpu)
    data = tensor.read(memory)
    if tensor.form in ("bitmap", "coded"):
        return _expand_stream(data, unpack_header(tensor, data), tensor.shape, out, device, executor)
    if tensor.form == "rans":
        rans = RansHeader.unpack(data[:HEADER_BYTES].tobytes(), len(data))
        if rans.elements != prod(tensor.shape):
            raise tensor.error(
                f"it must be of the shape {tensor.shape}, as the metadata states, not {rans.elements} elements"
            )
        return _expand_rans(data, rans, tensor.shape, tensor.dtype, out, device, executor)
    if tensor.dtype not in _DTYPES:
        raise tensor.error(f"its dtype must be one of {', '.join(_DTYPES)}, not {tensor.dtype}")
    on_gpu = _on_gpu(out, device)
    if tensor.form == "dense":
        values = data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
        return values if out is None and not on_gpu else _copy(values, tensor.dtype, out, device)
    values = _target(out, tensor.shape, tensor.dtype, on_gpu=on_gpu)
    rows = values.view(np.uint16).reshape(-1, tensor.shape[-1])
    expand_groups(data, rows, int(tensor.form.removeprefix("int")), ELEMENTS[tensor.dtype], executor)
    return _hand_over(values, tensor.dtype, out, device, on_gpu=on_gpu)


def unpack_header(tensor: WeightsTensor, data: NDArray[np.uint8]) -> BitmapHeader | CodedHeader:
    """The header of a tensor that is stored as a bitmap matrix or coded weights, as its form states. Raises
    StreamError, WeightsError for another one.
    """
    text, stated = data[:HEADER_BYTES].tobytes(), (ELEMENTS[tensor.dtype], prod(tensor.shape))
    if tensor.form == "coded":
        coded = CodedHeader.unpack(text, len(data))
        found, what = (coded.element, coded.elements), f"{coded.elements} elements of {coded.element.name}"
        header: BitmapHeader | CodedHeader = coded
    else:
        header = matrix = BitmapHeader.unpack(text, len(data))
        found = matrix.dense, matrix.rows * matrix.columns
        what = f"{matrix.rows} x {matrix.columns} of {matrix.dense.name}"
    if found != stated:
        metadata = f"of {tensor.dtype} and the shape {tensor.shape}, as the metadata states"
        raise tensor.error(f"it must be {metadata}, not {what}")
    return header


def _expand_rans(
    data: NDArray[np.uint8], header: RansHeader, shape: tuple[int, ...], dtype: str, out: Any, device: str | Device,
    executor: Executor | None,
) -> Any:  # fmt: skip
    """Bytes in rANS: by the host's cores, and copied where a GPU is to have them."""
    on_gpu = _on_gpu(out, device)
    if device != "host" and not on_gpu:
        name = device if isinstance(device, str) else device.identity.name
        raise FormatError(f"bytes in rANS must be expanded by host or cuda, not by {name}: no kernel reads them")
    target = _target(out, shape, dtype, on_gpu=on_gpu)
    expand_rans(data, target.view(np.uint8), executor)
    return _hand_over(target, dtype, out, device, on_gpu=on_gpu)


def _expand_stream(
    data: NDArray[np.uint8], header: BitmapHeader | CodedHeader, shape: tuple[int, ...], out: Any,
    device: str | Device, executor: Executor | None,
) -> Any:  # fmt: skip
    """A matrix or coded weights: by the host's cores, a GPU, or a device."""
    if isinstance(header, BitmapHeader) and header.rows * header.columns > 8 * len(data):  # a bit each, at least
        raise bitmap_error(StreamFault.LENGTH, f"{len(data)} bytes, {header.rows} x {header.columns} elements")
    if _on_gpu(out, device):
        from nearflash.weights.gpu import expand_stream

        return expand_stream(data, header, shape, out, device)
    target = _target(out, shape, _NAMES[header.dense], on_gpu=False)
    if device != "host":
        _expand_by(device, data, target)
    elif isinstance(header, CodedHeader):
        expand_coded(data, target.view("<u2"), executor)
    else:
        expand_into(data, target.reshape(header.rows, header.columns).view(np.uint8), executor)
    return target if out is None else out


def _target(out: Any, shape: tuple[int, ...], dtype: str, *, on_gpu: bool) -> NDArray[Any]:
    """Memory of the host to expand to: `out`'s, or new one."""
    return np.empty(shape, _DTYPES[dtype]) if out is None or on_gpu else _memory(out, shape, dtype)


def _hand_over(target: NDArray[Any], dtype: str, out: Any, device: str | Device, *, on_gpu: bool) -> Any:
    """Give the caller what was expanded to `target`: on a GPU a copy there."""
    if on_gpu:
        return _copy(target, dtype, out, device)
    return target if out is None else out


def _expand_by(device: str | Device, data: NDArray[np.uint8], target: NDArray[Any]) -> None:
    """Expand a stream by a device's kernel, opened for it where `device` is a name."""
    with open_device(device, "expand") if isinstance(device, str) else nullcontext(device) as opened:
        target[...] = expand_matrix(opened, data.tobytes()).dense.view(target.dtype).reshape(target.shape)


def _on_gpu(out: Any, device: str | Device) -> bool:
    """Whether a GPU is asked for. Raises UnknownDeviceError where it is not there."""
    if getattr(out, "is_cuda", False):
        return True
    if str(device).partition(":")[0] != "cuda":
        return False
    gpus = _gpus()
    if device not in ("cuda", *gpus) or not gpus:
        rule = f"host, or one of {', '.join(gpus)}" if gpus else "host: torch finds no GPU here"
        raise UnknownDeviceError(f"device must be {rule}, not {device!r}")
    return True


def _gpus() -> list[str]:
    """torch's names of this machine's GPUs."""
    if not find_spec("torch"):
        return []
    import torch

    return [f"cuda:{number}" for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]


def _copy(found: NDArray[Any], dtype: str, out: Any, device: str | Device) -> Any:
    if _on_gpu(out, device):
        from nearflash.weights.gpu import to_gpu

        return to_gpu(found, dtype, out, device)
    _memory(out, found.shape, dtype)[...] = found
    return out


def _memory(out: Any, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """The memory of an array or tensor as an array. Raises ShapeError, FormatError."""
    if tuple(out.shape) != shape:
        raise ShapeError(f"out must have the shape {shape}, not {tuple(out.shape)}")
    name, known = str(out.dtype).removeprefix("torch."), {np.dtype(_DTYPES[dtype]).name}
    known |= {_TORCH_NAMES[dtype]} if dtype in _TORCH_NAMES else set()
    if name not in known:
        raise FormatError(f"out must be of {' or '.join(sorted(known))}, not {name}")
    contiguous = out.flags.c_contiguous if isinstance(out, np.ndarray) else out.is_contiguous()
    if not contiguous:
        raise ShapeError("out must be contiguous, not a view with other strides")
    if not isinstance(out, np.ndarray):
        from torch import uint8

        out = out.detach().reshape(-1).view(uint8).numpy()
    values: NDArray[Any] = out.view(_DTYPES[dtype]).reshape(shape)
    return values
