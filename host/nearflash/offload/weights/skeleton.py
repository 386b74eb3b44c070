"""A model without weights, and where its layers are: what transformers builds from a configuration alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nearflash.offload.weights.groups import quantize_source
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.empty import empty_model
from nearflash.weights.folder import open_folder
from nearflash.weights.layers import decoder_layers
from nearflash.weights.pretrained import silent_transformers
from nearflash.weights.sources import Source, sources_of

__all__ = ["Skeleton", "find_weights", "open_skeleton"]


class _StoredWeights(Mapping[str, Tensor]):
    """A model's parameters by name, read when they are asked for; with bits of 4 as they are when they were
    quantised."""

    def __init__(self, sources: Mapping[str, Source], layers: str, tied: Mapping[str, str]) -> None:
        """layers: how their names begin. tied: names of parameters by those that share their tensor."""
        self._sources, self._layers, self._tied = sources, layers, tied
        self.bits = 16

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[self._tied.get(name, name)]
        if self.bits == 4 and name.startswith(self._layers):
            source = quantize_source(source, read=True)
        value = torch.empty(source.shape, dtype=source.dtype)
        source.read_into(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def find_weights(model: Any) -> _StoredWeights:
    """A skeleton's parameters, read where its identity is asked for, as from a hook of accelerate's."""
    found: _StoredWeights = model._hf_hook.weights_map
    return found


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
    a configuration, WeightsError for a checkpoint that lacks tensors or has others than the model's, UnsupportedError
    for a folder that asks for what is not done here (quantised weights, adapters), or a model without layers.
    """
    opened = open_folder(folder)
    tensors = open_checkpoint(opened.path)
    with silent_transformers():
        model = empty_model(opened, tensors, dtype)
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
    stored = _StoredWeights(sources, f"{prefix}.", model.all_tied_weights_keys)
    model._hf_hook = SimpleNamespace(weights_map=stored)
    inside = {id(module) for layer in layers for module in layer.modules()}
    owners = [
        module for module in model.modules()
        if id(module) not in inside and next(module.parameters(recurse=False), None) is not None
    ]  # fmt: skip
    return Skeleton(model, layers, layer_sources, others, owners, opened.path)
