"""Weights of a model's decoder layers pruned: by magnitude, by Wanda, by SparseGPT; unstructured or n of m.

Layer after layer, as the papers do: the inputs of a layer are what the pruned layers before it give.
Sources: Wanda (arXiv 2306.11695); SparseGPT (arXiv 2301.00774).
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nearflash.abi.errors import CommandError, NonFiniteError
from nearflash.weights.layers import LayerMatrix, layer_matrices, layers_with_matrices
from nearflash.weights.products import WatchedProducts

__all__ = ["METHODS", "PrunedLayer", "evaluation_mode", "prune", "prune_copies"]

METHODS = ("wanda", "sparsegpt", "magnitude")
_MATRIX_DIMENSIONS = 2
_Given: TypeAlias = list[list[dict[str, Any]]]
"""Of each window, what each layer is given beside the hidden states."""
_DAMPING, _BLOCK = 0.01, 128
"""Of SparseGPT: share of the mean diagonal that is added to the Hessian, and columns that are chosen at once."""


@dataclass(frozen=True)
class PrunedLayer:
    """A weight that was pruned, of a linear layer or of a layer's experts."""

    name: str
    """Its parameter's."""
    density: float
    """Share of its elements that are not zero."""
    seconds: float


@dataclass(frozen=True)
class _Layout:
    """Which elements may stay: `kept` of each `group` inputs of a row; of the row, where group is 0, a share of it."""

    sparsity: float
    kept: int = 0
    group: int = 0

    def mask(self, scores: Tensor) -> Tensor:
        """True for the elements of scores (rows, columns) that are pruned: the lowest, of equal ones the first."""
        rows, columns = scores.shape
        group = self.group or columns
        count = self.group - self.kept if self.group else round(columns * self.sparsity)
        order = scores.reshape(rows, -1, group).sort(dim=-1, stable=True).indices
        pruned = torch.zeros(rows, columns // group, group, dtype=torch.bool, device=scores.device)
        return pruned.scatter_(-1, order[..., :count], True).reshape(rows, columns)


def prune(
    model: Any,
    tokens: Tensor | None,
    *,
    method: str = METHODS[0],
    sparsity: float = 0.5,
    pattern: tuple[int, int] | None = None,
) -> Iterator[PrunedLayer]:
    """Prune the matrices of a model's decoder layers, in place, while the iterator is advanced.

    Those of linear layers, and of each expert, by what comes to it: one that no token comes to, by magnitude.

    tokens: int64 (sequences, length), of texts like those the model will see; None will do for `magnitude`.
    method: `wanda` (|W| times the norm of its input), `sparsegpt` (which also updates the weights that stay), or
    `magnitude` (|W|).
    sparsity: the share that is pruned, of each row, or with `sparsegpt` of each 128 columns of all rows.
    pattern: (n, m): of each m inputs n stay, and `sparsity` does not count.

    Raises CommandError for other options or tokens, UnsupportedError for a model without decoder layers, before
    anything is changed; NonFiniteError while it runs, where activations are not finite.
    """
    layers = layers_with_matrices(model)
    layout = _check_options(model, tokens, method, sparsity, pattern, layers)
    return _prune(model, layers, tokens, method, layout)


def prune_copies(
    model: Any, tokens: Tensor | None, *, method: str, sparsities: Collection[float]
) -> Iterator[dict[tuple[str, float], Tensor]]:
    """Give each decoder layer's matrices pruned at several sparsities, by name and sparsity; the model stays as it is.

    Inputs of a layer are what the layers before it give unpruned: one pass is enough for all sparsities. Raises as
    `prune` does.
    """
    layers = layers_with_matrices(model)
    layouts = {each: _check_options(model, tokens, method, each, None, layers) for each in sparsities}
    with evaluation_mode(model):
        hidden, given = _capture(model, layers, tokens if method != "magnitude" else None)
        for number, layer in enumerate(layers):
            matrices = layer_matrices(model, layer)
            with _watch(matrices, method) as seen:
                hidden = _run_all(layer, number, hidden, given)
            pruned = {}
            for name, matrix in matrices.items():
                for sparsity, layout in layouts.items():
                    copied = replace(matrix, weight=nn.Parameter(matrix.weight.detach().clone(), requires_grad=False))
                    _prune_matrix(name, copied, seen, method, layout)
                    pruned[name, sparsity] = copied.weight.detach()
            yield pruned


def _check_options(
    model: Any, tokens: Tensor | None, method: str, sparsity: float, pattern: tuple[int, int] | None, layers: list[Any]
) -> _Layout:
    if method not in METHODS:
        raise CommandError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    if not 0 < sparsity < 1:
        raise CommandError(f"sparsity must be above 0 and below 1, not {sparsity!r}")
    if method != "magnitude" and (tokens is None or tokens.ndim != 2 or not tokens.numel()):
        raise CommandError(f"tokens must have the shape (sequences, length) for the method {method}")
    if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < model.config.vocab_size:
        raise CommandError(f"tokens must be of the model's vocabulary of {model.config.vocab_size}")
    if pattern is None:
        return _Layout(sparsity)
    kept, group = pattern
    if not 0 < kept < group:
        raise CommandError(f"pattern must be n of m with 0 < n < m, not {kept} of {group}")
    for layer in layers:
        for name, matrix in layer_matrices(model, layer).items():
            if matrix.inputs % group:
                raise CommandError(f"pattern {kept} of {group} must divide the {matrix.inputs} inputs of {name}")
    return _Layout(1 - kept / group, kept, group)


def _prune(
    model: Any, layers: list[nn.Module], tokens: Tensor | None, method: str, layout: _Layout
) -> Iterator[PrunedLayer]:
    with evaluation_mode(model):
        hidden, given = _capture(model, layers, tokens if method != "magnitude" else None)
        for number, layer in enumerate(layers):
            matrices = layer_matrices(model, layer)
            start = time.perf_counter()
            with _watch(matrices, method) as seen:
                _run_all(layer, number, hidden, given)
            for name, matrix in matrices.items():
                density = _prune_matrix(name, matrix, seen, method, layout)
                yield PrunedLayer(name, density, time.perf_counter() - start)
                start = time.perf_counter()
            hidden = _run_all(layer, number, hidden, given)


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """The model computes as it does when it is used, and one product for each expert, whose inputs can be told apart,
    where transformers has a choice; afterwards as before.
    """
    trained = [module for module in model.modules() if module.training]
    experts = getattr(model.config, "_experts_implementation", None)
    has_choice = experts is not None and hasattr(model, "set_experts_implementation")
    model.eval()
    try:
        if has_choice:
            model.set_experts_implementation("eager")
        yield
    finally:
        if has_choice:
            model.set_experts_implementation(experts)
        for module in trained:
            module.training = True


def _watch(matrices: dict[str, LayerMatrix], method: str) -> WatchedProducts:
    return WatchedProducts({name: matrix.weight for name, matrix in matrices.items()}, method == "sparsegpt")


@torch.no_grad()
def _prune_matrix(name: str, matrix: LayerMatrix, seen: WatchedProducts, method: str, layout: _Layout) -> float:
    """Prune a weight in place, of experts each; returns the share of its elements that are not zero."""
    weight = matrix.weight
    experts = weight if weight.ndim > _MATRIX_DIMENSIONS else weight[None]
    transposed = seen.transposed.get(name, matrix.transposed)
    for number, expert in enumerate(experts):
        view = expert.T if transposed else expert
        view.copy_(_new_weight(name, view, seen.sums.get((name, number)), method, layout))
    return float(torch.count_nonzero(weight) / weight.numel())


@torch.no_grad()
def _capture(model: Any, layers: list[nn.Module], tokens: Tensor | None) -> tuple[list[Tensor], _Given]:
    """The hidden states (1, length, d) that go into the first layer, and what each layer is given beside them."""
    hidden: list[Tensor] = []
    given: _Given = []

    def see(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if number == 0:
                hidden.append(positional[0] if positional else keywords["hidden_states"])
            given[-1].append({name: value for name, value in keywords.items() if name != "hidden_states"})

        return hook

    hooks = [layer.register_forward_pre_hook(see(number), with_kwargs=True) for number, layer in enumerate(layers)]
    try:
        for row in tokens if tokens is not None else ():
            given.append([])
            model.get_decoder()(row[None].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, given


@torch.no_grad()
def _run_all(layer: nn.Module, number: int, hidden: list[Tensor], given: _Given) -> list[Tensor]:
    """The hidden states that a layer gives of those that go into it, one window at a time."""
    outputs = (layer(states, **keywords[number]) for states, keywords in zip(hidden, given, strict=True))
    return [out[0] if isinstance(out, tuple) else out for out in outputs]


def _new_weight(name: str, weight: Tensor, statistics: Tensor | None, method: str, layout: _Layout) -> Tensor:
    if statistics is not None and not statistics.isfinite().all():
        raise NonFiniteError(f"inputs of {name.removesuffix('.weight')} must be finite: compute in bf16 or fp32")
    wide = weight.float()
    if statistics is None:  # magnitude, or an expert that no token came to
        return wide.masked_fill(layout.mask(wide.abs()), 0)
    if method == "wanda":
        return wide.masked_fill(layout.mask(wide.abs() * statistics.sqrt()), 0)
    return _optimal_brain_surgeon(wide, statistics, layout)


def _optimal_brain_surgeon(weight: Tensor, products: Tensor, layout: _Layout) -> Tensor:
    """SparseGPT: columns from left to right, the error of each pruned one made up by those behind it."""
    weight, columns = weight.clone(), weight.shape[1]
    unused = products.diagonal() == 0
    hessian = products.clone()
    hessian.diagonal()[unused] = 1
    weight[:, unused] = 0
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    block = layout.group or _BLOCK
    for first in range(0, columns, block):
        last = min(first + block, columns)
        part, inverse_part = weight[:, first:last], inverse[first:last, first:last]
        scores = part.square() / inverse_part.diagonal().square()
        pruned = layout.mask(scores if layout.group else scores.reshape(1, -1)).view_as(part)
        errors = torch.zeros_like(part)
        for column in range(last - first):
            kept = part[:, column].masked_fill(pruned[:, column], 0)
            errors[:, column] = (part[:, column] - kept) / inverse_part[column, column]
            part[:, column:] -= errors[:, column, None] * inverse_part[column, None, column:]
            part[:, column] = kept
        weight[:, last:] -= errors @ inverse[first:last, last:]
    return weight
