"""A transformers model, or a checkpoint as it lies, written as a checkpoint of compressed weights."""

import json
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from nearflash.abi.errors import NonFiniteError, StateError
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.support.files import copy_durably, read_text, remove_on_error
from nearflash.support.prefetch import Prefetcher
from nearflash.weights.checkpoint import INDEX, SINGLE, write_index
from nearflash.weights.compress import compress_bytes, compress_tensor, dense_tensor
from nearflash.weights.empty import list_kept_dtypes
from nearflash.weights.file import BYTE_DTYPES, CHECKPOINT, PackedTensor, WeightsTensor, write_file
from nearflash.weights.folder import ADAPTER
from nearflash.weights.layers import layer_matrices, layers_with_matrices
from nearflash.weights.parts import REPORT
from nearflash.weights.sources import read_dense
from nearflash.weights.weights_map import TORCH_DTYPES

__all__ = ["SHARD_BYTES", "Written", "copy_others", "count_bytes", "layer_weights", "write_checkpoint", "write_model"]

SHARD_BYTES = 4 << 30
"""Dense bytes of a file of several."""
_HEADER_BYTES = 320
"""Of a tensor in a file's header, at most, beside its name, which stands there three times."""
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
    is_chosen: bool
    """Whether it is one of those that were to be compressed; others may be coded losslessly beside them."""


@dataclass(frozen=True)
class _Entry:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    """Of the dense tensor."""
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    format: str
    """One of FORMATS; "": it stays dense."""
    bits: int = 16
    is_chosen: bool = True

    @property
    def dense_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def layer_weights(model: Any) -> list[str]:
    """Names, in the model's order, of the matrices within a model's decoder layers: of linear layers, and of experts.

    Raises UnsupportedError where there are none.
    """
    return [name for layer in layers_with_matrices(model) for name in layer_matrices(model, layer)]


def write_model(
    model: Any,
    folder: Path,
    *,
    format: str,
    bits: int,
    dtype: torch.dtype,
    compressed: Collection[str],
    lossless: bool = False,
    forms: Mapping[str, tuple[str, int]] | None = None,
    metadata: Mapping[str, str] | None = None,
    written: Callable[[Written], None] = lambda _: None,
) -> int:
    """Write a model's tensors to a new folder: those named in `compressed` in a form of compress_tensor; returns bytes.

    They have the names and shapes that transformers saves them with: experts that it fused as it loaded them are apart.
    dtype: fp16 or bf16, of the floating-point tensors but for those that transformers keeps in fp32. lossless: whether
    other matrices, as embeddings, are coded. forms: format and bits of single names of `compressed`. Several files,
    with their index, where they are large. `written` is told of each tensor. Raises StateError where the folder has
    something in it, NonFiniteError where a finite weight is infinite in `dtype`, and what `compress_tensor` raises;
    nothing is left then.
    """
    how = {name: (format, bits) for name in compressed} | dict(forms or {})
    return _write_folder(_list_entries(model, dtype, how, lossless), folder, metadata or {}, written)


def count_bytes(model: Any, dtype: torch.dtype, compressed: Collection[str]) -> tuple[int, int]:
    """Bytes of a model's dense tensors; and those that all but the ones named take in write_model's file, losslessly,
    with a header, which may be some less."""
    entries = _list_entries(model, dtype, dict.fromkeys(compressed, ("", 16)), lossless=True)
    header = sum(_HEADER_BYTES + 3 * len(entry.name) for entry in entries) + BLOCK_BYTES
    others = sum(len(_pack(entry)[0].data) for entry in entries if not entry.is_chosen)
    return sum(entry.dense_bytes for entry in entries), header + others


def _list_entries(
    model: Any, dtype: torch.dtype, how: Mapping[str, tuple[str, int]], lossless: bool
) -> list[_Entry]:  # fmt: skip
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    kept = list_kept_dtypes(model, dtype, state)
    groups: dict[tuple[tuple[str, int] | None, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in state.items():
        own = kept.get(name, dtype) if tensor.is_floating_point() else tensor.dtype
        groups.setdefault((how.get(name), own), {})[name] = tensor
    entries = []
    for (form, own), group in groups.items():
        options = (*form, True) if form else (_lossless_format(own) if lossless else "", 16, False)
        for name, tensor in revert_weight_conversion(model, group).items():
            entries.append(_Entry(name, own, tuple(tensor.shape), partial(Tensor.detach, tensor), *options))
    return entries


def write_checkpoint(
    tensors: Mapping[str, WeightsTensor],
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    written: Callable[[Written], None] = lambda _: None,
) -> int:
    """Write a checkpoint's tensors to a new folder, losslessly coded, one after another; returns bytes.

    Names, shapes and dtypes are the checkpoint's; dtype: fp16 or bf16, which floating-point tensors become instead,
    but for those of fp8, whose scales lie beside them.
    Raises as `write_model` does, and WeightsError for damaged tensors.
    """
    entries = []
    for name, tensor in tensors.items():
        if tensor.dtype not in TORCH_DTYPES:
            raise tensor.error(f"its dtype must be one of {', '.join(TORCH_DTYPES)}, not {tensor.dtype}")
        own = TORCH_DTYPES[tensor.dtype]
        own = dtype if dtype and own.is_floating_point and own.itemsize > 1 else own
        entries.append(_Entry(name, own, tensor.shape, partial(read_dense, tensor), _lossless_format(own)))
    return _write_folder(entries, folder, metadata or {}, written)


def _lossless_format(dtype: torch.dtype) -> str:
    return "coded" if dtype in (torch.float16, torch.bfloat16) or _NAMES[dtype] in BYTE_DTYPES else ""


def _write_folder(
    entries: list[_Entry], folder: Path, metadata: Mapping[str, str], written: Callable[[Written], None]
) -> int:
    if folder.exists() and any(folder.iterdir()):
        raise StateError(f"{folder} must be a new or an empty folder")
    with remove_on_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return _write(entries, folder, metadata, written)


def _write(entries: list[_Entry], folder: Path, metadata: Mapping[str, str], written: Callable[[Written], None]) -> int:
    shards = list(_shards(entries))
    checkpoint = secrets.token_hex(16)  # files of two runs must not pass for one checkpoint's
    metadata = {**metadata, CHECKPOINT: checkpoint}
    sizes, places = [], {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        planned = {entry.name: (_NAMES[entry.dtype], entry.shape) for entry in shard}
        sizes.append(write_file(folder / file, planned, _pack_all(shard, written), metadata))
        places.update(dict.fromkeys(planned, file))
    if len(shards) > 1:
        write_index(folder, places, sum(sizes), checkpoint)
    return sum(sizes)


def _shards(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Entries of each file, the compressed ones first: they are whole blocks, and begin at multiples of 64 so."""
    shard: list[_Entry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.dense_bytes > SHARD_BYTES:
            yield sorted(shard, key=lambda each: not each.format)
            shard, size = [], 0
        shard.append(entry)
        size += entry.dense_bytes
    yield sorted(shard, key=lambda each: not each.format)


def _pack_all(shard: list[_Entry], written: Callable[[Written], None]) -> Iterator[PackedTensor]:
    """The entries packed, in order, by as many threads as there are processors, few of them ahead."""
    threads = os.cpu_count() or 1

    def pack(number: int) -> tuple[PackedTensor, Written]:
        return _pack(shard[number])

    with closing(Prefetcher("nearflash-pack", pack, threads=threads)) as packs:
        for number in range(len(shard)):
            for later in range(number, min(number + threads + 1, len(shard))):
                packs.begin(later)
            tensor, outcome = packs.take(number)
            written(outcome)
            yield tensor


def _pack(entry: _Entry) -> tuple[PackedTensor, Written]:
    """An entry packed, and what came of it."""
    tensor = entry.read()
    narrow = tensor.to("cpu", entry.dtype).contiguous()
    if narrow.dtype != tensor.dtype and not torch.equal(narrow.isfinite(), tensor.isfinite().cpu()):
        raise NonFiniteError(f"tensor {entry.name!r} must be finite in {entry.dtype}: choose bf16")
    data: NDArray[np.uint8] = narrow.view(-1).view(torch.uint8).numpy()
    if entry.format and narrow.ndim > 1 and narrow.dtype.itemsize == 1:
        packed = compress_bytes(entry.name, _NAMES[narrow.dtype], entry.shape, data)
    elif entry.format and narrow.ndim > 1:
        matrix = data.view(np.float16 if narrow.dtype == torch.float16 else np.uint16).reshape(entry.shape)
        packed = compress_tensor(entry.name, matrix, entry.format, entry.bits)
    else:
        packed = dense_tensor(entry.name, _NAMES[narrow.dtype], entry.shape, data)
    values = int(torch.count_nonzero(tensor.float() if tensor.dtype.itemsize == 1 else tensor))
    return packed, Written(entry.name, packed.form, tensor.numel(), values, entry.dense_bytes, len(packed.data),
                           entry.is_chosen)  # fmt: skip


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
