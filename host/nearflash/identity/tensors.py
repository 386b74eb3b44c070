"""The content of a model's tensors: every byte of every parameter and buffer, wherever they lie.

SHA-256 in threads, 3.5 GB/s on two cores of a Xeon with its instructions; CRC32C of each part of 4 MiB where a change
within one process is looked for, 17 GB/s (as fast as memory is read). Nothing is converted: bytes are as they are.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nearflash.abi.errors import UnsupportedError
from nearflash.identity.plain import OPAQUE, digest_of, plain
from nearflash.storage.io.checksum import crc32c

__all__ = ["content_digest", "find_tensors", "sum_words", "tensor_digests"]

_PART_BYTES = 4 << 20
_Place = tuple[Any, ...]


def find_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers (persistent or not), tensors that are plain attributes, and what a quantised module's state
    has beside them; tied ones under each of their names. Raises UnsupportedError for state that cannot be compared."""
    names = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        plain_ones = {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}
        for leaf, value in {**plain_ones, **module._buffers, **module._parameters}.items():
            if value is not None:
                name = f"{prefix}.{leaf}" if prefix else leaf
                names.add(name)
                yield from _flat(name, value)
    for name, value in model.state_dict().items():
        if name not in names:
            yield from _flat(name, value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those that a subclass, a list or a mapping is made of."""
    if isinstance(value, Tensor):
        if value.is_quantized:
            yield from _flat(name, _codes(value))
            return
        if not hasattr(value, "__tensor_flatten__"):
            yield name, value
            return
        for part in value.__tensor_flatten__()[0]:
            yield from _flat(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, list | tuple) and plain(value) is OPAQUE:
        for number, item in enumerate(value):
            yield from _flat(f"{name}.{number}", item)
    elif (text := plain(value)) is not OPAQUE:
        yield name, torch.frombuffer(bytearray(digest_of(text), "ascii"), dtype=torch.uint8)
    else:
        kind = type(value).__name__
        raise UnsupportedError(f"state {name!r} must be tensors, numbers or text to be compared, not {kind}")


def _codes(value: Tensor) -> list[Tensor]:
    """The codes of a tensor of torch's own quantised dtypes."""
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [value.int_repr(), torch.tensor([value.q_scale(), value.q_zero_point()], dtype=torch.float64)]
    return [value.int_repr(), value.q_per_channel_scales(), value.q_per_channel_zero_points()]


def tensor_digests(
    tensors: Iterator[tuple[str, Tensor]], read: Callable[[str], Tensor | None] = lambda _: None, *,
    stored: Mapping[str, str] = MappingProxyType({}), quick: bool = False, dtype: torch.dtype | None = None,
) -> dict[str, str]:  # fmt: skip
    """Digest of shape, dtype and all bytes of each tensor; tied ones are read once.

    read: finds the tensor of a name without memory (on the meta device). stored: digests that stand for tensors, by
    name, wherever they lie now, if at all. quick: CRC32C in place of SHA-256. dtype: floating-point tensors are
    converted to it, one after another. Raises UnsupportedError for a tensor whose bytes cannot be read.
    """
    digests = dict(stored)
    seen: dict[_Place, list[Future[bytes]]] = {}
    waiting: dict[str, tuple[Tensor, list[Future[bytes]]]] = {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "nearflash-identity") as pool:
        for name, tensor in tensors:
            if name in stored:
                continue
            value = _with_memory(name, tensor, read)
            place = _place(name, value)
            if dtype is not None and value.is_floating_point() and value.dtype != dtype:
                value = value.detach().to(dtype)
            if tensor.is_meta or value.data_ptr() != place[1]:
                digests[name] = _digest_parts(value, _begin(pool, value, quick))  # memory of its own: not all at once
                continue
            if place not in seen:
                seen[place] = _begin(pool, value, quick)
            waiting[name] = value, seen[place]
        return digests | {name: _digest_parts(*parts) for name, parts in waiting.items()}


def _place(name: str, tensor: Tensor) -> _Place:
    """The place of a tensor's bytes. Raises UnsupportedError where it has none of its own."""
    try:
        if tensor.layout is not torch.strided:
            raise ValueError("no plain bytes")
        return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        what = f"{type(tensor).__name__} of {tensor.dtype} in the layout {tensor.layout}"
        raise UnsupportedError(f"tensor {name!r} must be of plain bytes to be compared, not {what}") from error


def content_digest(tensor: Tensor) -> str:
    """The digest of one tensor: see `tensor_digests`."""
    return tensor_digests(iter([("tensor", tensor)]))["tensor"]


def _with_memory(name: str, tensor: Tensor, read: Callable[[str], Tensor | None]) -> Tensor:
    source = read(name) if tensor.is_meta else tensor
    if source is None:
        raise UnsupportedError(
            f"tensor {name!r} must have memory, or a source that it is read from when its module runs, but it is on "
            "the meta device: load the model with from_pretrained or nearflash.weights.loading.load"
        )
    return torch.as_tensor(source)


def _begin(pool: ThreadPoolExecutor, tensor: Tensor, quick: bool) -> list[Future[bytes]]:
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    function = _sum_of if quick else _hash_of
    return [pool.submit(function, part) for part in data.split(_PART_BYTES)]


def _hash_of(part: Tensor) -> bytes:
    return hashlib.sha256(part.cpu().numpy().data).digest()


def _sum_of(part: Tensor) -> bytes:
    if part.device.type == "cpu":
        return crc32c(part.numpy()).to_bytes(4, "little")
    return sum_words(part)


def sum_words(part: Tensor) -> bytes:
    """Sums modulo 2^64 of 32-bit words and of words times their number, computed where they lie: bytes of a GPU's
    memory need not cross the link to be compared with what they were."""
    odd_bytes = len(part) % 4
    words = torch.nn.functional.pad(part, (0, 4 - odd_bytes if odd_bytes else 0)).view(torch.int32).to(torch.int64)
    numbers = torch.arange(1, len(words) + 1, device=part.device)
    return torch.stack([words.sum(), (words * numbers).sum()]).cpu().numpy().tobytes()


def _digest_parts(tensor: Tensor, parts: list[Future[bytes]]) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in parts:
        digest.update(part.result())
    return digest.hexdigest()
