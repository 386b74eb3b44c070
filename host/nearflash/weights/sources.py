"""Which stored tensors each of a model's parameters comes from.

transformers renames tensors as it loads them, and fuses those of a layer's experts into one parameter; its own table of
such conversions is used here, so that a checkpoint is read as it lies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
)

from nearflash.abi.errors import WeightsError
from nearflash.weights.expand import expand
from nearflash.weights.file import WeightsTensor
from nearflash.weights.weights_map import TORCH_DTYPES, KeptTensor

__all__ = ["Piece", "Source", "sources_of"]


@dataclass(frozen=True)
class Piece:
    """A stored tensor, and its place in the parameter."""

    tensor: WeightsTensor
    place: tuple[int | slice, ...] = ()
    """Index into the parameter; () is all of it."""

    def read_into(self, parameter: Tensor) -> None:
        """Put it into its place, converted to the parameter's dtype. Raises WeightsError."""
        view = parameter[self.place] if self.place else parameter
        if TORCH_DTYPES.get(self.tensor.dtype) is view.dtype and view.is_contiguous():
            expand(self.tensor, out=view)
        else:
            view.copy_(_dense(self.tensor))


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from: stored tensors in their places, or whatever else transformers makes of them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the parameter."""
    pieces: tuple[Piece, ...]
    converter: Any = None
    """transformers' conversion of `pieces`, where their places do not say it all."""
    patterns: tuple[str, ...] = ()
    """Of each piece, for the converter."""

    @property
    def size_bytes(self) -> int:
        """Of the parameter."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """In the checkpoint."""
        return sum(piece.tensor.stored_bytes for piece in self.pieces)

    def read_into(self, parameter: Tensor) -> None:
        """Fill the parameter. Raises WeightsError."""
        if self.converter is None:
            for piece in self.pieces:
                piece.read_into(parameter)
            return
        found: dict[str, list[Tensor]] = {}
        for pattern, piece in zip(self.patterns, self.pieces, strict=True):
            found.setdefault(pattern, []).append(_dense(piece.tensor).to(self.dtype))
        made: Any = found
        for operation in self.converter.operations:
            made = operation.convert(
                made, source_patterns=self.converter.source_patterns, target_patterns=self.converter.target_patterns,
                full_layer_name=self.name,
            )  # fmt: skip
        value = next(iter(made.values()))
        parameter.copy_(value[0] if isinstance(value, list) else value)

    def kept(self) -> "Source":
        """The same with all its stored bytes read already."""
        pieces = [
            piece if isinstance(piece.tensor, KeptTensor) else replace(piece, tensor=KeptTensor(piece.tensor))
            for piece in self.pieces
        ]
        return replace(self, pieces=tuple(pieces))

    @property
    def experts(self) -> int:
        """How many rows of the first dimension can be read alone; 0 where none can."""
        if self.converter is not None or len(self.shape) < 2:
            return 0
        whole = len(self.pieces) == 1 and not self.pieces[0].place and self.pieces[0].tensor.form == "dense"
        return self.shape[0] if whole or all(piece.place for piece in self.pieces) else 0


def _dense(tensor: WeightsTensor) -> Tensor:
    if tensor.dtype not in TORCH_DTYPES:
        raise tensor.error(f"its dtype must be one of {', '.join(TORCH_DTYPES)}, not {tensor.dtype}")
    return torch.from_numpy(expand(tensor)).view(TORCH_DTYPES[tensor.dtype])


def sources_of(model: Any, tensors: Mapping[str, WeightsTensor]) -> dict[str, Source]:
    """Of every parameter of a model (on the meta device) but those that are tied to another one; by name.

    Raises WeightsError where a tensor is missing, or of another shape than the model's.
    """
    expected = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, list[tuple[str | None, WeightsTensor]]] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        found.setdefault(target, []).append((pattern, tensors[name]))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    sources = {}
    for name, parameter in expected.items():
        if name not in found:
            if name in tied:
                continue
            raise WeightsError(f"tensor {name!r} must be in the checkpoint, as the model has it")
        pattern = found[name][0][0]
        converter = None if pattern is None else by_pattern[pattern]
        sources[name] = _source(name, parameter, found[name], converter)
    return sources


def _source(
    name: str, parameter: Tensor, found: list[tuple[str | None, WeightsTensor]], converter: WeightConverter | None
) -> Source:
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if converter is None:
        tensor = found[0][1]
        if tensor.shape != shape:
            raise tensor.error(f"its shape must be {shape}, as the model's, not {tensor.shape}")
        return Source(name, shape, dtype, (Piece(tensor),))
    kinds = [type(operation) for operation in converter.operations]
    plain = kinds == [MergeModulelist] or (kinds == [MergeModulelist, Concatenate] and converter.operations[1].dim == 1)
    if plain and converter.operations[0].dim == 0:
        return Source(name, shape, dtype, tuple(_placed(shape, found, converter)))
    patterns = tuple(str(pattern) for pattern, _ in found)
    return Source(name, shape, dtype, tuple(Piece(tensor) for _, tensor in found), converter, patterns)


def _placed(
    shape: tuple[int, ...], found: list[tuple[str | None, WeightsTensor]], converter: WeightConverter
) -> Iterator[Piece]:
    """Tensors of single experts, one after another along the second dimension for each."""
    row = 0
    for pattern in converter.source_patterns:
        own = [tensor for mine, tensor in found if mine == pattern]
        for expert, tensor in enumerate(own):
            if len(own) != shape[0] or tensor.shape[1:] != shape[2:]:
                rule = f"{shape[0]} tensors of the shape {shape[1:]}, in parts along the first dimension"
                raise tensor.error(f"it must be one of {rule}, not one of {len(own)} of {tensor.shape}")
            yield Piece(tensor, (expert, slice(row, row + tensor.shape[0])))
        row += own[0].shape[0] if own else 0
    if row != shape[1]:
        raise found[0][1].error(f"experts must have {shape[1]} rows in all, not {row}")
