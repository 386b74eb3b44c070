"""A transformers model written as a checkpoint of compressed weights."""

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.errors import NonFiniteError, StateError
from nearflash.support.files import copy_durably, read_text
from nearflash.weights.checkpoint import INDEX, SINGLE, write_index
from nearflash.weights.compress import compress_tensor, dense_tensor
from nearflash.weights.file import CHECKPOINT, PackedTensor, write_file
from nearflash.weights.folder import ADAPTER
from nearflash.weights.layers import layers_with_linears, linear_layers
from nearflash.weights.parts import REPORT
from nearflash.weights.weights_map import TORCH_DTYPES

__all__ = ["SHARD_BYTES", "Written", "copy_others", "linear_weights", "write_model"]

SHARD_BYTES = 4 << 30
"""Dense bytes of a file of several."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """The outcome for one tensor."""

    name: str
    form: str
    elements: int
    values: int
    """Elements that are not zero."""
    dense_bytes: int
    stored_bytes: int


def linear_weights(model: Any) -> list[str]:
    """Names of the weights of the linear layers within a model's decoder layers, in the model's order.

    Raises UnsupportedError where there are none.
    """
    return [f"{name}.weight" for layer in layers_with_linears(model) for name in linear_layers(model, layer)]


def write_model(
    model: Any,
    folder: Path,
    *,
    format: str,
    bits: int,
    dtype: torch.dtype,
    compressed: Collection[str],
    metadata: Mapping[str, str] | None = None,
    written: Callable[[Written], None] = lambda _: None,
) -> int:
    """Write a model's tensors to a new folder: those named in `compressed` in a form of compress_tensor; returns bytes.

    dtype: fp16 or bf16, of all floating-point tensors that are written. Several files, with their index, where they are
    large. `written` is told of each tensor. Raises StateError where the folder has something in it, NonFiniteError
    where a finite weight is infinite in `dtype`, and what `compress_tensor` raises; nothing is left then.
    """
    if folder.exists() and any(folder.iterdir()):
        raise StateError(f"{folder} must be a new or an empty folder")
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _write(model, folder, format, bits, dtype, frozenset(compressed), metadata or {}, written)
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        if not existed:
            folder.rmdir()
        raise


def _write(
    model: Any, folder: Path, format: str, bits: int, dtype: torch.dtype, compressed: frozenset[str],
    metadata: Mapping[str, str], written: Callable[[Written], None],
) -> int:  # fmt: skip
    shards = list(_shards(model, dtype, compressed))
    checkpoint = secrets.token_hex(16)  # files of two runs must not pass for one checkpoint's
    metadata = {**metadata, CHECKPOINT: checkpoint}
    sizes, places = [], {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        planned = {name: (_NAMES[_target(tensor, dtype)], tuple(tensor.shape)) for name, tensor in names.items()}

        def pack_all(names: Mapping[str, Tensor] = names) -> Iterator[PackedTensor]:
            for name, tensor in names.items():
                stored = _pack(name, tensor, format, bits, dtype, name in compressed)
                values = int(torch.count_nonzero(tensor))
                dense_bytes = tensor.numel() * _target(tensor, dtype).itemsize
                written(Written(name, stored.form, tensor.numel(), values, dense_bytes, len(stored.data)))
                yield stored

        sizes.append(write_file(folder / file, planned, pack_all(), metadata))
        places.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        write_index(folder, places, sum(sizes), checkpoint)
    return sum(sizes)


def _shards(model: Any, dtype: torch.dtype, compressed: frozenset[str]) -> Iterator[dict[str, Tensor]]:
    """Tensors of each file, the compressed ones first: they are whole blocks, and begin at multiples of 64 so."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in state.items():
        size_bytes = tensor.numel() * _target(tensor, dtype).itemsize
        if shard and size + size_bytes > SHARD_BYTES:
            yield dict(sorted(shard.items(), key=lambda item: item[0] not in compressed))
            shard, size = {}, 0
        shard[name], size = tensor, size + size_bytes
    yield dict(sorted(shard.items(), key=lambda item: item[0] not in compressed))


def _target(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _pack(name: str, tensor: Tensor, format: str, bits: int, dtype: torch.dtype, compressed: bool) -> PackedTensor:
    narrow = tensor.detach().to("cpu", _target(tensor, dtype)).contiguous()
    if narrow.is_floating_point() and not torch.equal(narrow.isfinite(), tensor.isfinite().cpu()):
        raise NonFiniteError(f"tensor {name!r} must be finite in {dtype}: choose bf16")
    data: NDArray[np.uint8] = narrow.view(-1).view(torch.uint8).numpy()
    if not compressed:
        return dense_tensor(name, _NAMES[narrow.dtype], tuple(narrow.shape), data)
    values = data.view(np.float16 if dtype == torch.float16 else np.uint16).reshape(narrow.shape)
    return compress_tensor(name, values, format, bits)


def copy_others(model: Any, tokenizer: Any, source: Path, folder: Path) -> None:
    """Copy what a model's folder holds beside its weights: configuration, tokenizer, licence; mode 0600.

    A link's file is copied, as those of a hub's cache are links: its mode must not become a wider one. Where the source
    is no folder, configuration and tokenizer are written as transformers does.
    """
    if not source.is_dir():
        config = deepcopy(model.config)
        if hasattr(config, "quantization_config"):  # of a package's GGUF, whose weights are unpacked here
            del config.quantization_config
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return
    weights = {INDEX, ADAPTER, REPORT, *(_read_index(source / INDEX) if (source / INDEX).is_file() else ())}
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".gguf", ".pt") and path.name not in weights:
            copy_durably(path, folder / path.name)


def _read_index(index: Path) -> set[str]:
    return set(json.loads(read_text(index))["weight_map"].values())
