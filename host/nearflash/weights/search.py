"""Which form each decoder layer's weights take for a size or a loss: chosen by losses that are measured.

The loss of each form is measured with all layers in it, and shared among them by how sensitive the model is to each
layer's errors (`sensitivity`): as many passes as there are forms, where a pass for each layer in each form would make
their time grow with the square of the layers. Of a layer's forms those on the lower convex hull of bytes and loss are
taken, and of all layers' steps along their hulls first those that cost the least loss a byte (Lagrange relaxation of
the multiple-choice knapsack problem; Shoham and Gersho, IEEE Trans. ASSP 36(9), 1988). What is chosen so is measured as
a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearflash.weights.compress import BITS, compress_tensor
from nearflash.weights.expand import expand_packed
from nearflash.weights.file import PackedTensor
from nearflash.weights.layers import layer_matrices, layers_with_matrices
from nearflash.weights.perplexity import perplexity
from nearflash.weights.prune import prune_copies
from nearflash.weights.sensitivity import LayerSensitivity

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
    """A layer in a form: bytes of its matrices, and what the model loses with it, all other layers as they are."""

    layer: int
    choice: LayerForm
    stored_bytes: int
    loss: float
    """Nats a token more."""


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

    method: of `prune`, or `none`. dtype: fp16 or bf16, of the weights that are stored; what is measured computes in the
    model's own. choices: forms, the lossless one first; None: those of `list_choices`.
    """

    def __init__(self, model: Any, method: str, dtype: torch.dtype, choices: Sequence[LayerForm] | None = None) -> None:
        self._model, self._method, self._dtype = model, method, dtype
        self.choices = list(choices or list_choices(method))
        self._layers = [list(layer_matrices(model, layer)) for layer in layers_with_matrices(model)]
        self._dense = {name: model.get_parameter(name).detach().clone() for names in self._layers for name in names}
        self._weights, self._lossless_bytes = {0.0: self._dense}, list[int]()

    def least_bytes(self) -> int:
        """Bytes of all layers' matrices in the smallest of the forms of 4 bits, pruned by magnitude for it.

        Codes take as many bytes of other weights; where SparseGPT leaves unequal rows, some more.
        """
        forms = [choice for choice in self.choices if choice.bits == BITS[-1]]
        sparsities = sorted({form.sparsity for form in forms} - {0.0})
        copies = prune_copies(self._model, None, method="magnitude", sparsities=sparsities)
        total = 0
        for names, pruned in zip(self._layers, copies, strict=True):
            pruned |= {(name, 0.0): self._dense[name] for name in names}
            total += min(sum(len(self._pack(name, self._narrow(pruned[name, form.sparsity]), form).data)
                             for name in names) for form in forms)  # fmt: skip
        return total

    def list_lossless(self) -> list[MeasuredForm]:
        """Each layer as it is, in 16 bits; packed once, however often its bytes are asked for."""
        lossless = self.choices[0]
        self._lossless_bytes = [self._compress(layer, lossless)[0] for layer in range(self.layers)]
        return [MeasuredForm(layer, lossless, stored, 0.0) for layer, stored in enumerate(self._lossless_bytes)]

    def dense_bytes(self, layer: int) -> int:
        """Bytes of a layer's matrices in 16 bits, not compressed."""
        return sum(2 * self._dense[name].numel() for name in self._layers[layer])

    def calibrate(self, tokens: Tensor | None) -> Iterator[int]:
        """Prune the layers as the choices need it, while the iterator is advanced; tokens (windows, length).

        Raises as prune_copies does.
        """
        sparsities = sorted({choice.sparsity for choice in self.choices} - {0.0})
        self._weights |= {sparsity: {} for sparsity in sparsities}
        copies = prune_copies(self._model, tokens, method=self._method, sparsities=sparsities) if sparsities else ()
        for number, pruned in enumerate(copies):
            for (name, sparsity), weight in pruned.items():
                self._weights[sparsity][name] = weight.to("cpu", self._dtype)
            yield number

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

    def measure(
        self, tokens: Tensor, differentiated: Callable[[str], None] = lambda _: None
    ) -> Iterator[list[MeasuredForm]]:
        """All layers in a form, form by form, with the loss on windows (n, length).

        differentiated: is told of each window whose gradients are there, before the first form comes.
        """
        layers = layers_with_matrices(self._model)
        sensitivity = LayerSensitivity(self._model, layers, tokens, differentiated)
        base = log(perplexity(self._model, tokens))
        for choice in self.choices:
            sizes = []
            try:
                for layer in range(self.layers):
                    stored, weights = self._compress(layer, choice)
                    sizes.append(stored)
                    self._fill(weights)
                errors = [sensitivity.estimate(layer) for layer in range(self.layers)]
                more = log(perplexity(self._model, tokens)) - base if any(errors) else 0.0
            finally:
                self.restore()
            # Noise of a form that hardly loses anything may be a gain: its order by layers is worth more than that.
            scale = more / sum(errors) if more > 0 else 1.0
            yield [MeasuredForm(layer, choice, size, scale * error)
                   for layer, (size, error) in enumerate(zip(sizes, errors, strict=True))]  # fmt: skip

    def measure_loss(self, chosen: Mapping[int, LayerForm], tokens: Tensor) -> float:
        """Nats a token, with layers in the forms chosen."""
        try:
            for layer, choice in chosen.items():
                self._fill(self._round(layer, choice) if choice.bits == BITS[0] else self._compress(layer, choice)[1])
            return log(perplexity(self._model, tokens))
        finally:
            self.restore()

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
            yield stored / sum(map(self.dense_bytes, range(self.layers)))
        finally:
            self.restore()

    def _compress(self, layer: int, choice: LayerForm) -> tuple[int, dict[str, Tensor]]:
        """Bytes of a layer's matrices in a form, and what they expand to."""
        weights, packed = self._round(layer, choice), []
        if choice == self.choices[0] and self._lossless_bytes:
            return self._lossless_bytes[layer], weights
        for name, weight in weights.items():
            packed.append(self._pack(name, weight, choice))
            if choice.bits != BITS[0]:
                weights[name] = torch.from_numpy(expand_packed(packed[-1])).view(self._dtype)
        return sum(len(tensor.data) for tensor in packed), weights

    def _round(self, layer: int, choice: LayerForm) -> dict[str, Tensor]:
        """A layer's matrices, pruned for a form, as they are stored in 16 bits."""
        pruned = self._weights[choice.sparsity]
        return {name: self._narrow(pruned[name]) for name in self._layers[layer]}

    def _narrow(self, weight: Tensor) -> Tensor:
        return weight.to("cpu", self._dtype).contiguous()

    def _pack(self, name: str, weight: Tensor, choice: LayerForm) -> PackedTensor:
        """Pack a weight of 16 bits. Raises as compress_tensor."""
        patterns = weight.view(torch.uint16).numpy()
        values = patterns.view(np.float16) if weight.dtype == torch.float16 else patterns
        return compress_tensor(name, values, choice.format, choice.bits)


def pick_by_size(steps: Sequence[dict[int, MeasuredForm]], room_bytes: int) -> dict[int, MeasuredForm]:
    """The first of the steps whose layers take `room_bytes` at most; the last one where none does."""
    fitting = (step for step in steps if sum(each.stored_bytes for each in step.values()) <= room_bytes)
    return next(fitting, steps[-1])


def pick_by_loss(
    steps: Sequence[dict[int, MeasuredForm]], most: float, measure: Callable[[dict[int, MeasuredForm]], float]
) -> dict[int, MeasuredForm]:
    """The last of the steps, by bisection, whose loss as a whole, measured, is `most` or less; the first one's is."""
    low, high = 0, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(steps[middle]) <= most else (low, middle)
    return steps[low]
