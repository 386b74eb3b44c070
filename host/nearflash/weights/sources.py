"""Which stored tensors each of a model's parameters comes from, and that no stored tensor is left over.

transformers renames tensors as it loads them, fuses those of a layer's experts into one parameter, and splits others;
its own table of such conversions is used here, so that a checkpoint is read as it lies. What transformers would pass
over with a warning (a tensor that is missing, left over, or of integers where the model computes with floating point)
is an error here: it changes results.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
from nearflash.storage.io.direct import aligned_buffer
from nearflash.weights.expand import expand
from nearflash.weights.file import TensorExpander, WeightsTensor
from nearflash.weights.folder import FLOATING
from nearflash.weights.striped import Stripes
from nearflash.weights.weights_map import TORCH_DTYPES, KeptTensor

__all__ = ["Source", "SourcePiece", "read_dense", "sources_of"]


@dataclass(frozen=True)
class SourcePiece:
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
            view.copy_(read_dense(self.tensor))

    def keep(self, memory: Callable[[int], NDArray[np.uint8]] = aligned_buffer) -> "SourcePiece":
        """The same with its stored bytes read already, into what `memory` gives. Raises WeightsError."""
        if isinstance(self.tensor, KeptTensor):
            return self
        return replace(self, tensor=KeptTensor(self.tensor, self.tensor.read(memory)))


@dataclass(frozen=True)
class Source:
    """The source of a parameter: stored tensors in their places, or whatever else transformers makes of them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The parameter's dtype."""
    pieces: tuple[SourcePiece, ...]
    converter: Any = None
    """transformers' conversion of `pieces`, where their places do not say it all."""
    patterns: tuple[str, ...] = ()
    """Of each piece, for the converter."""
    target: str = ""
    """Which of the converter's results it is, where there are several."""
    config: Any = None
    """The model's, for the converter."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameter."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_one_tensor(self) -> bool:
        """Whether it is a stored tensor as it is, but for its form and dtype."""
        return self.converter is None and len(self.pieces) == 1 and not self.pieces[0].place

    @property
    def stored_bytes(self) -> int:
        """In the checkpoint."""
        return sum(piece.tensor.stored_bytes for piece in self.pieces)

    @property
    def host_bytes(self) -> int:
        """Bytes of the checkpoint that the host reads for it: what a device expands beside its drive it does not."""
        return sum(piece.tensor.stored_bytes for piece in self.pieces if piece.tensor.is_expanded_by_host)

    def with_expander(self, expander: TensorExpander) -> "Source":
        """The same with its compressed tensors expanded by a device."""
        return self._change_tensors(lambda tensor: replace(tensor, expander=expander))

    def on_stripes(self, stripes: Stripes) -> "Source":
        """The same with its tensors read from several drives."""
        return self._change_tensors(lambda tensor: replace(tensor, file=stripes.file(tensor.file)))

    def _change_tensors(self, change: Callable[[WeightsTensor], WeightsTensor]) -> "Source":
        return replace(self, pieces=tuple(replace(piece, tensor=change(piece.tensor)) for piece in self.pieces))

    def read_into(self, parameter: Tensor) -> None:
        """Fill the parameter. Raises WeightsError."""
        if self.converter is None:
            for piece in self.pieces:
                piece.read_into(parameter)
            return
        parameter.copy_(self._convert([read_dense(piece.tensor).to(self.dtype) for piece in self.pieces]))

    def check(self) -> "Source":
        """Itself. Raises WeightsError where the conversion of its pieces gives another shape than the parameter's."""
        shapes = [torch.empty(piece.tensor.shape, dtype=self.dtype, device="meta") for piece in self.pieces]
        error = self.pieces[0].tensor.error
        try:
            shape = tuple(self._convert(shapes).shape)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as reason:
            raise error(f"transformers cannot convert it to {self.name!r} ({reason})") from reason
        if shape != self.shape:
            raise error(f"the shape of {self.name!r}, made of it, must be {self.shape}, as the model's, not {shape}")
        return self

    def _convert(self, values: Sequence[Tensor]) -> Tensor:
        """Make of the pieces what transformers' converter does."""
        made: dict[str, Any] = {}
        for pattern, value in zip(self.patterns, values, strict=True):
            made.setdefault(pattern, []).append(value)
        for operation in self.converter.operations:
            made = operation.convert(
                made, source_patterns=self.converter.source_patterns, target_patterns=self.converter.target_patterns,
                full_layer_name=self.name, model=None, config=self.config, missing_keys=None,
            )  # fmt: skip
        value = made[self.target] if self.target in made else next(iter(made.values()))
        return value[0] if isinstance(value, list) else value

    def keep(self) -> "Source":
        """The same with all its stored bytes read already."""
        return replace(self, pieces=tuple(piece.keep() for piece in self.pieces))

    @property
    def experts(self) -> int:
        """How many rows of the first dimension can be read alone; 0 where none can."""
        if self.converter is not None or len(self.shape) < 2:
            return 0
        whole = len(self.pieces) == 1 and not self.pieces[0].place and self.pieces[0].tensor.form == "dense"
        return self.shape[0] if whole or all(piece.place for piece in self.pieces) else 0


def read_dense(tensor: WeightsTensor) -> Tensor:
    """A stored tensor, dense, of its own dtype and shape. Raises WeightsError."""
    if tensor.dtype not in TORCH_DTYPES:
        raise tensor.error(f"its dtype must be one of {', '.join(TORCH_DTYPES)}, not {tensor.dtype}")
    return torch.from_numpy(expand(tensor)).view(TORCH_DTYPES[tensor.dtype])


_Found = dict[str, list[tuple[str | None, WeightsTensor]]]
"""By the name of a parameter: the stored tensors that it comes from, and of each the converter's pattern, if any."""


def sources_of(model: Any, tensors: Mapping[str, WeightsTensor]) -> dict[str, Source]:
    """Sources of a model's parameters and stored buffers (on the meta device) but those tied to another; by name.

    Tied parameters of which only one is stored come from that; where both are and differ, they are untied in the model,
    as transformers does. Raises WeightsError where a tensor is missing, left over, stored twice, of another shape than
    the model's, or of integers or 8-bit numbers where the model computes with floating point.
    """
    conversions = get_model_conversion_mapping(model)
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    stored = _collect(model, tensors, conversions, expected)
    _follow_ties(model, stored)
    _check_left_over(model, stored, expected)
    sources: dict[str, Source] = {}
    for name, pieces in stored.items():
        if name in expected:
            converter = None if pieces[0][0] is None else by_pattern[pieces[0][0]]
            sources.update(_sources(name, expected, pieces, converter, model.config))
    _check_missing(model, sources, expected)
    return {name: sources[name] for name in expected if name in sources}


def _collect(
    model: Any, tensors: Mapping[str, WeightsTensor], conversions: Iterable[Any], expected: Mapping[str, Tensor]
) -> _Found:
    """The stored tensors by the name that transformers gives them."""
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    renamings = [conversion for conversion in conversions if not isinstance(conversion, WeightConverter)]
    stored: _Found = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        stored.setdefault(target, []).append((pattern, tensors[name]))
    return stored


def _follow_ties(model: Any, found: _Found) -> None:
    """Leave one entry of `found` for each group of tied parameters, and untie those that are stored and differ."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(tied.items()):
        if target not in found:
            continue
        if source not in found:
            found[source] = found.pop(target)
        elif _are_equal(found[target], found[source]):
            del found[target]
        else:
            del tied[target]
            owner, _, leaf = target.rpartition(".")
            parameters = model.get_submodule(owner)._parameters
            parameters[leaf] = torch.nn.Parameter(torch.empty_like(parameters[leaf]))


def _are_equal(some: list[tuple[str | None, WeightsTensor]], others: list[tuple[str | None, WeightsTensor]]) -> bool:
    (_, first), (_, other) = some[0], others[0]
    return first.shape == other.shape and torch.equal(read_dense(first).float(), read_dense(other).float())


def _check_left_over(model: Any, found: _Found, expected: Mapping[str, Tensor]) -> None:
    computed = {name for name, _ in model.named_buffers()}  # older versions of transformers stored some of them
    report = SimpleNamespace(missing_keys=set(), unexpected_keys=found.keys() - expected.keys() - computed)
    model._adjust_missing_and_unexpected_keys(report)
    if report.unexpected_keys:
        tensor = found[min(report.unexpected_keys)][0][1]
        raise tensor.error(
            f"it must be one of {type(model).__name__}'s, or one that it states to ignore: results may depend on it, "
            f"and nothing reads it ({len(report.unexpected_keys)} such names; quantised checkpoints have scales beside "
            "their weights). Take the checkpoint that is not quantised, or one of this model class"
        )


def _check_missing(model: Any, sources: Mapping[str, Source], expected: Mapping[str, Tensor]) -> None:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    missing = {name for name in expected.keys() - sources.keys() if tied.get(name) not in sources}
    buffers = {name for name, _ in model.named_buffers()}
    report = SimpleNamespace(missing_keys=missing & buffers, unexpected_keys=set())
    model._adjust_missing_and_unexpected_keys(report)
    if lacking := sorted(missing - buffers | report.missing_keys):
        raise WeightsError(
            f"tensor {lacking[0]!r} must be in the checkpoint, as the model has it ({len(lacking)} missing): copy the "
            "checkpoint again"
        )


def _sources(
    name: str, expected: Mapping[str, Tensor], found: list[tuple[str | None, WeightsTensor]],
    converter: WeightConverter | None, config: Any,
) -> dict[str, Source]:  # fmt: skip
    """The parameter `name`, and those that are split off the same tensors."""
    parameter = expected[name]
    shape, dtype = tuple(parameter.shape), parameter.dtype
    for pattern, tensor in found:
        _check_dtype(tensor, dtype)
        if (pattern is None) != (converter is None) or (converter is None and len(found) > 1):
            others = ", ".join(sorted(repr(tensor.name) for _, tensor in found))
            raise tensor.error(f"{name!r} must be stored once, not as {others}")
    if converter is None:
        tensor = found[0][1]
        if tensor.shape != shape:
            raise tensor.error(f"its shape must be {shape}, as the model's, not {tensor.shape}")
        return {name: Source(name, shape, dtype, (SourcePiece(tensor),))}
    kinds = [type(operation) for operation in converter.operations]
    plain = kinds == [MergeModulelist] or (kinds == [MergeModulelist, Concatenate] and converter.operations[1].dim == 1)
    if plain and converter.operations[0].dim == 0:
        return {name: Source(name, shape, dtype, tuple(_place_experts(shape, found, converter)))}
    patterns, pieces = tuple(str(pattern) for pattern, _ in found), tuple(SourcePiece(tensor) for _, tensor in found)
    several = len(converter.target_patterns) > 1
    made = {}
    for target in converter.target_patterns:
        renamed = name.replace(converter.target_patterns[0], target)
        if renamed in expected:
            shape, dtype = tuple(expected[renamed].shape), expected[renamed].dtype
            source = Source(renamed, shape, dtype, pieces, converter, patterns, target if several else "", config)
            made[renamed] = source.check()
    return made


def _check_dtype(tensor: WeightsTensor, dtype: torch.dtype) -> None:
    if tensor.dtype not in FLOATING if dtype.is_floating_point else TORCH_DTYPES.get(tensor.dtype) is not dtype:
        rule = f"one of {', '.join(FLOATING)}" if dtype.is_floating_point else str(dtype)
        raise tensor.error(
            f"its dtype must be {rule}, as the model's, not {tensor.dtype}: quantised weights are not read here; take "
            "the checkpoint that is not quantised"
        )


def _place_experts(
    shape: tuple[int, ...], found: list[tuple[str | None, WeightsTensor]], converter: WeightConverter
) -> Iterator[SourcePiece]:
    """Tensors of single experts, one after another along the second dimension for each."""
    row = 0
    for pattern in converter.source_patterns:
        expert_tensors = [tensor for mine, tensor in found if mine == pattern]
        for expert, tensor in enumerate(expert_tensors):
            if len(expert_tensors) != shape[0] or tensor.shape[1:] != shape[2:]:
                rule = f"{shape[0]} tensors of the shape {shape[1:]}, in parts along the first dimension"
                raise tensor.error(f"it must be one of {rule}, not one of {len(expert_tensors)} of {tensor.shape}")
            yield SourcePiece(tensor, (expert, slice(row, row + tensor.shape[0])))
        row += expert_tensors[0].shape[0] if expert_tensors else 0
    if row != shape[1]:
        raise found[0][1].error(f"experts must have {shape[1]} rows in all, not {row}")
