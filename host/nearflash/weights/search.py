"""Which form each decoder layer's weights take for a size or a loss: chosen by losses that are measured.

A layer is measured in each form while all others are as they are. Of its forms those on the lower convex hull of bytes
and loss are taken, and of all layers' steps along their hulls first those that cost the least loss a byte (Lagrange
relaxation of the multiple-choice knapsack problem; Shoham and Gersho, IEEE Trans. ASSP 36(9), 1988). What is chosen so
is measured as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearflash.weights.compress import compress_tensor
from nearflash.weights.expand import expand_packed
from nearflash.weights.layers import layer_matrices, layers_with_matrices
from nearflash.weights.perplexity import perplexity
from nearflash.weights.prune import prune

__all__ = ["LayerForm", "LayerSearch", "MeasuredForm", "list_choices", "list_steps", "pick_by_loss", "pick_by_size"]

SPARSITIES = (0.25, 0.5)
"""Shares of a layer's weights that are pruned, beside none."""


@dataclass(frozen=True)
class LayerForm:
    """A form of a layer's weights."""

    sparsity: float
    """Share that is pruned; 0: none."""
    format: str
    """One of compress.FORMATS."""
    bits: int

    @property
    def name(self) -> str:
        """In tables: `lossless`, `int4`, `pruned 0.5, int8`, …"""
        pruned = [f"pruned {self.sparsity:g}"] if self.sparsity else []
        return ", ".join([*pruned, *([f"int{self.bits}"] if self.bits < 16 else [])]) or "lossless"


@dataclass(frozen=True)
class MeasuredForm:
    """A layer in a form: bytes of its matrices, and the loss of the model with it, all other layers as they are."""

    layer: int
    choice: LayerForm
    stored_bytes: int
    loss: float
    """Nats a token."""


def list_choices(method: str) -> list[LayerForm]:
    """The forms that are measured, the lossless one first; method: of `prune`, or `none`."""
    prunings = [(sparsity, format, bits) for sparsity in SPARSITIES
                for format, bits in (("coded", 16), ("bitmap", 8), ("bitmap", 4))]  # fmt: skip
    forms = [(0.0, "coded", 16), (0.0, "groups", 8), (0.0, "groups", 4), *(prunings if method != "none" else [])]
    return [LayerForm(*form) for form in forms]


def list_steps(measured: Sequence[MeasuredForm], layers: int) -> list[dict[int, MeasuredForm]]:
    """Choices of all layers, from the lossless one of each to the smallest, a layer's step after another.

    Each takes fewer bytes than the one before it.
    """
    current = {number: _lossless(measured, number) for number in range(layers)}
    steps = [(slope, number, point) for number in range(layers) for slope, point in _hull(measured, current[number])]
    path = [dict(current)]
    for _, number, point in sorted(steps, key=lambda step: step[0]):  # stable: slopes of a layer ascend already
        current[number] = point
        path.append(dict(current))
    return path


def _lossless(measured: Sequence[MeasuredForm], layer: int) -> MeasuredForm:
    return next(each for each in measured if each.layer == layer and each.choice == LayerForm(0.0, "coded", 16))


def _hull(measured: Sequence[MeasuredForm], first: MeasuredForm) -> Iterator[tuple[float, MeasuredForm]]:
    """The next points of a layer's lower convex hull, each of fewer bytes, with the loss that a byte saved costs."""
    at = first
    while smaller := [each for each in measured if each.layer == at.layer and each.stored_bytes < at.stored_bytes]:
        slopes = [(each.loss - at.loss) / (at.stored_bytes - each.stored_bytes) for each in smaller]
        best = min(range(len(smaller)), key=lambda number: (slopes[number], smaller[number].stored_bytes))
        at = smaller[best]
        yield slopes[best], at


class LayerSearch:
    """A model whose layers take one form or another; as it was, but while something is measured.

    method: of `prune`, or `none`; calibration: tokens (windows, length) for it. dtype: fp16 or bf16, of the weights
    that are stored; what is measured computes in the model's own. choices: forms, the lossless one first; None: those
    of `list_choices`.
    """

    def __init__(
        self, model: Any, calibration: Tensor | None, method: str, dtype: torch.dtype,
        choices: Sequence[LayerForm] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._dtype, self.choices = model, dtype, list(choices or list_choices(method))
        self._layers = [list(layer_matrices(model, layer)) for layer in layers_with_matrices(model)]
        self._dense = {name: model.get_parameter(name).detach().clone() for names in self._layers for name in names}
        self._weights = {0.0: self._dense}
        for sparsity in sorted({choice.sparsity for choice in self.choices} - {0.0}):
            for _ in prune(model, calibration, method=method, sparsity=sparsity):
                pass
            self._weights[sparsity] = {name: model.get_parameter(name).detach().clone() for name in self._dense}
            self.restore()

    def least_bytes(self) -> int:
        """Bytes of all layers' matrices in the smaller of the forms of 4 bits."""
        forms = [choice for choice in self.choices if choice.bits == 4]
        return sum(min(self._compress(layer, form)[0] for form in forms) for layer in range(self.layers))

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    def restore(self) -> None:
        """Give the model the weights that it came with."""
        self._fill(self._dense)

    @torch.no_grad()
    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._model.get_parameter(name).copy_(weight)

    def measure(self, tokens: Tensor) -> Iterator[MeasuredForm]:
        """Each layer in each form, with the loss on windows (n, length)."""
        base = self.measure_loss({}, tokens)
        for layer in range(self.layers):
            for choice in self.choices:
                stored, weights = self._compress(layer, choice)
                loss = base if choice == self.choices[0] else self._loss_with(weights, tokens)
                yield MeasuredForm(layer, choice, stored, loss)

    def measure_loss(self, chosen: Mapping[int, LayerForm], tokens: Tensor) -> float:
        """Nats a token, with layers in the forms chosen."""
        weights: dict[str, Tensor] = {}
        for layer, choice in chosen.items():
            weights |= self._compress(layer, choice)[1]
        return self._loss_with(weights, tokens)

    def apply(self, chosen: Mapping[int, LayerForm]) -> dict[str, tuple[str, int]]:
        """Prune the model's layers as chosen; returns format and bits of each weight, for write_model."""
        forms: dict[str, tuple[str, int]] = {}
        for layer, choice in chosen.items():
            names = self._layers[layer]
            self._fill({name: self._weights[choice.sparsity][name] for name in names})
            forms |= dict.fromkeys(names, (choice.format, choice.bits))
        return forms

    @contextmanager
    def fill_layers(self, form: LayerForm) -> Iterator[float]:
        """Inside of the block all layers have a form; gives the bytes of their matrices over those in 16 bits."""
        stored, weights = 0, dict[str, Tensor]()
        for layer in range(self.layers):
            size, expanded = self._compress(layer, form)
            stored, weights = stored + size, weights | expanded
        self._fill(weights)
        try:
            yield stored / sum(2 * weight.numel() for weight in weights.values())
        finally:
            self.restore()

    def _loss_with(self, weights: Mapping[str, Tensor], tokens: Tensor) -> float:
        self._fill(weights)
        try:
            return log(perplexity(self._model, tokens))
        finally:
            self.restore()

    def _compress(self, layer: int, choice: LayerForm) -> tuple[int, dict[str, Tensor]]:
        """Bytes of a layer's matrices in a form, and what they expand to."""
        stored, weights = 0, {}
        for name in self._layers[layer]:
            narrow = self._weights[choice.sparsity][name].to("cpu", self._dtype).contiguous()
            size, weights[name] = _compress_and_expand(name, narrow, choice)
            stored += size
        return stored, weights


def _compress_and_expand(name: str, weight: Tensor, choice: LayerForm) -> tuple[int, Tensor]:
    """Bytes of a weight of fp16 or bf16 in a form, and what it expands to. Raises as compress_tensor."""
    patterns = weight.view(torch.uint16).numpy()
    values = patterns.view(np.float16) if weight.dtype == torch.float16 else patterns
    packed = compress_tensor(name, values, choice.format, choice.bits)
    if choice.bits == 16:
        return len(packed.data), weight
    return len(packed.data), torch.from_numpy(expand_packed(packed)).view(weight.dtype)


def pick_by_size(steps: Sequence[dict[int, MeasuredForm]], room_bytes: int) -> dict[int, MeasuredForm]:
    """The first of the steps whose layers take `room_bytes` at most; the last one does."""
    return next(step for step in steps if sum(each.stored_bytes for each in step.values()) <= room_bytes)


def pick_by_loss(
    steps: Sequence[dict[int, MeasuredForm]], most: float, measure: Callable[[dict[int, MeasuredForm]], float]
) -> dict[int, MeasuredForm]:
    """The last of the steps, by bisection, whose loss as a whole, measured, is `most` or less; the first one's is."""
    low, high = 0, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(steps[middle]) <= most else (low, middle)
    return steps[low]
