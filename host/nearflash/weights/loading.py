"""transformers models loaded from a checkpoint whose weights may be compressed, and may be more than memory holds."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import PrefixedDataset
from accelerate.utils.modeling import set_module_tensor_to_device
from transformers import AutoConfig

from nearflash.abi.errors import CommandError, WeightsError
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.file import WeightsTensor
from nearflash.weights.weights_map import TORCH_DTYPES, WeightsMap, buffer_bytes

__all__ = ["load"]

_TENSORS_AHEAD = 3
"""Of the largest one's size: about a layer."""


def load(
    model_class: Any,
    path: Path | str,
    *,
    budget: int | None = None,
    device: str = "cpu",
    prefetch_bytes: int | None = None,
) -> Any:
    """The model of a folder with a config.json and a checkpoint, on `device`, ready for inference.

    model_class: AutoModelForCausalLM, or any of transformers' model classes.
    budget: bytes of memory that its weights may take; None: as many as there are. Within it come, in this order, what
    is not compressed; memory to read, expand and prefetch in; the compressed tensors as they are stored; and dense ones
    in place of them, from the first layer on. Compressed tensors beyond it stay on disk, and each is read when its turn
    comes near.
    prefetch_bytes: dense tensors that are expanded before their turn; None: those of a layer, about.

    Weights are those that were compressed, to the bit. Raises WeightsError where a tensor is missing, damaged, or of
    another shape than the model's, before anything is loaded; CommandError for a budget that is too small. A tensor on
    disk is checked each time that it is read.
    """
    tensors = open_checkpoint(path)
    model = _empty(model_class, path, _dtype(tensors))
    names = _checked(model, tensors, Path(path))
    placed = _placed([tensors[name] for name in names], budget, prefetch_bytes)
    with WeightsMap({name: tensors[name] for name in names if name not in placed.offloaded}, device=device) as weights:
        for name, value in weights.items():
            set_module_tensor_to_device(model, name, device, value=value)
    model.tie_weights()
    if placed.offloaded:
        weights = WeightsMap(placed.offloaded, placed.prefetch_bytes, placed.in_memory, device)
        weakref.finalize(model, weights.close)
        for module in {name.rpartition(".")[0]: None for name in placed.offloaded}:
            part = PrefixedDataset(weights, f"{module}.")
            add_hook_to_module(model.get_submodule(module), AlignDevicesHook(device, offload=True, weights_map=part))
    for name, buffer in model.named_buffers():
        set_module_tensor_to_device(model, name, device, value=buffer)
    return model.eval()


def _empty(model_class: Any, path: Path | str, dtype: torch.dtype) -> Any:
    """The model, its parameters without memory."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with init_empty_weights(include_buffers=False):
        model = build(config, dtype=dtype)
    model.tie_weights()
    return model


def _dtype(tensors: Mapping[str, WeightsTensor]) -> torch.dtype:
    """The floating-point dtype of most elements."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.dense_bytes
    floating = {name: size for name, size in sizes.items() if name in ("F64", "F32", "F16", "BF16")}
    return TORCH_DTYPES[max(floating, key=lambda name: floating[name])] if floating else torch.float32


def _checked(model: Any, tensors: Mapping[str, WeightsTensor], path: Path) -> list[str]:
    """The names of the model's tensors, in its order, those that are tied to another one without it."""
    expected, tied = model.state_dict(), getattr(model, "all_tied_weights_keys", None) or {}
    names = []
    for name, tensor in expected.items():
        if name not in tensors:
            if name in tied and tied[name] in tensors:
                continue
            raise WeightsError(f"{path}: tensor {name!r} must be there, as the model has it")
        if tensors[name].shape != tuple(tensor.shape):
            raise tensors[name].error(
                f"its shape must be {tuple(tensor.shape)}, as the model's, not {tensors[name].shape}"
            )
        names.append(name)
    return names


@dataclass(frozen=True)
class _Placed:
    """Where the tensors go that are not dense in memory."""

    offloaded: dict[str, WeightsTensor]
    """Expanded whenever their module runs."""
    in_memory: set[str]
    """Those whose stored bytes are kept."""
    prefetch_bytes: int


def _placed(tensors: Sequence[WeightsTensor], budget: int | None, prefetch_bytes: int | None) -> _Placed:
    """As `load` describes it. Raises CommandError."""
    packed = {tensor.name: tensor for tensor in tensors if tensor.form != "dense"}
    if budget is None or not packed:
        return _Placed({}, set(), 0)
    largest = max(tensor.dense_bytes for tensor in packed.values())
    ahead = _TENSORS_AHEAD * largest if prefetch_bytes is None else prefetch_bytes
    dense = sum(tensor.stored_bytes for tensor in tensors if tensor.form == "dense")
    buffers = buffer_bytes(packed.values(), ahead)
    needed = dense + buffers
    if budget < needed:
        raise CommandError(f"budget must be {needed} bytes at least, {dense} for what is not compressed and {buffers} "
                           f"to read, expand and prefetch in, not {budget!r}")  # fmt: skip
    room, in_memory = budget - needed, set()
    for tensor in packed.values():
        if tensor.stored_bytes <= room:
            room -= tensor.stored_bytes
            in_memory.add(tensor.name)
    resident = set()
    for tensor in packed.values() if in_memory == packed.keys() else ():
        if tensor.dense_bytes - tensor.stored_bytes <= room:
            room -= tensor.dense_bytes - tensor.stored_bytes
            resident.add(tensor.name)
    modules = {name.rpartition(".")[0] for name in packed.keys() - resident}
    offloaded = {each.name: each for each in tensors if each.name.rpartition(".")[0] in modules}
    return _Placed(offloaded, (in_memory | (offloaded.keys() - packed.keys())) - resident, ahead)
