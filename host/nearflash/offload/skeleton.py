"""A model without weights, and where its layers are: what transformers builds from a configuration alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.inference.settings import generation_config_of
from nearflash.pretrained import silent_transformers
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.sources import Source, sources_of
from nearflash.weights.weights_map import TORCH_DTYPES

__all__ = ["Skeleton", "decoder_layers", "open_skeleton"]


@dataclass
class Skeleton:
    """A model whose parameters have no memory yet, and what to fill them from."""

    model: Any
    layers: list[Any]
    """Its decoder layers, in their order."""
    layer_sources: list[dict[str, Source]]
    """Of each layer, by the parameter's name in the layer."""
    other_sources: dict[str, Source]
    """Of what lies outside the layers, by the parameter's name in the model."""
    others: list[Any]
    """Modules outside the layers that have parameters of their own."""
    folder: Path


def open_skeleton(folder: Path | str, dtype: torch.dtype | None = None) -> Skeleton:
    """The model of a folder with a config.json and a checkpoint; nothing of its tensors is read.

    dtype: what it computes in; None: what most of the checkpoint is stored in. Raises CommandError for a folder without
    a configuration, WeightsError for a checkpoint that lacks tensors, UnsupportedError for a model without layers.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CommandError(f"model must be a folder with a config.json, not {str(folder)!r}")
    tensors = open_checkpoint(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if dtype is None:
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors.values():
            own = TORCH_DTYPES.get(tensor.dtype, torch.float32)
            sizes[own] = sizes.get(own, 0) + tensor.dense_bytes * own.is_floating_point
        dtype = max(sizes, key=lambda each: sizes[each], default=torch.float32)
    with silent_transformers(), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = generation_config_of(folder, config)
    model.tie_weights()
    model.eval()
    prefix, layers = decoder_layers(model)
    sources = sources_of(model, tensors)
    layer_sources: list[dict[str, Source]] = [{} for _ in layers]
    others = {}
    for name, source in sources.items():
        number, _, inner = name.removeprefix(f"{prefix}.").partition(".")
        if name.startswith(f"{prefix}.") and number.isdecimal():
            layer_sources[int(number)][inner] = source
        else:
            others[name] = source
    inside = {id(module) for layer in layers for module in layer.modules()}
    owners = [
        module for module in model.modules()
        if id(module) not in inside and next(module.parameters(recurse=False), None) is not None
    ]  # fmt: skip
    return Skeleton(model, layers, layer_sources, others, owners, folder)


def decoder_layers(model: Any) -> tuple[str, list[Any]]:
    """Name and modules of the list of decoder layers: the one as long as the configuration says, of most parameters.

    Raises UnsupportedError where there is none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]  # fmt: skip
    if not lists:
        raise UnsupportedError(f"model must have a list of {count} layers, but {model.config.model_type!r} has none")
    name, found = max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()))
    return name, list(found)
