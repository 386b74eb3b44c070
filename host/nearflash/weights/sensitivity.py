"""Estimates of what errors in decoder layers' outputs cost a model, in nats a token.

The divergence between the model's predictions and those with an error e of a layer's outputs is, to second order,
E[(g·e)²] / 2, where g is the gradient of the log probability of tokens that the model itself draws (its Fisher
information). Gradients of all layers come from one pass forward and one back for each draw, and one layer computes for
an estimate, not all behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nearflash.abi.errors import NonFiniteError
from nearflash.weights.prune import evaluation_mode

__all__ = ["LayerSensitivity"]

DRAWS = 4
"""Tokens drawn for each position of a window."""


@dataclass
class _Pass:
    """A layer's inputs in one window, its outputs, and gradients of the draws by these."""

    hidden: Tensor
    keywords: dict[str, Any]
    outputs: Tensor
    gradients: list[Tensor]


class LayerSensitivity:
    """Estimates of losses, by a model's layers as they were when it was made.

    tokens: int64 (windows, length). advance: is told of each window that is done. Raises NonFiniteError where the model
    has no finite logits for one.
    """

    def __init__(
        self, model: Any, layers: list[nn.Module], tokens: Tensor, advance: Callable[[str], None] = lambda _: None
    ) -> None:
        self._model, self._layers, self._length = model, layers, tokens.shape[1]
        self._passes: list[list[_Pass]] = []
        generator = torch.Generator().manual_seed(0)
        with evaluation_mode(model):
            for number, window in enumerate(tokens):
                self._passes.append(self._differentiate(window, generator))
                advance(f"window {number}")

    def _differentiate(self, window: Tensor, generator: torch.Generator) -> list[_Pass]:
        passes: list[_Pass] = []

        def keep(_: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], outputs: Any) -> None:
            hidden = positional[0] if positional else keywords["hidden_states"]
            others = {name: _detach(value) for name, value in keywords.items() if name != "hidden_states"}
            passes.append(_Pass(hidden.detach(), others, outputs[0] if isinstance(outputs, tuple) else outputs, []))

        hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in self._layers]
        embeddings = self._model.get_input_embeddings()
        hooks.append(embeddings.register_forward_hook(lambda *all_of: all_of[2].detach().requires_grad_(True)))
        try:
            with torch.enable_grad():
                logits = self._model(window[None].to(self._model.device), use_cache=False).logits[0].float()
                if not logits.isfinite().all():
                    raise NonFiniteError("logits must be finite: compute in fp32, or take weights without NaN")
                drawn = [torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator).squeeze(1)
                         for _ in range(DRAWS)]  # fmt: skip
                losses = [cross_entropy(logits, labels.to(logits.device), reduction="sum") for labels in drawn]
                for number, loss in enumerate(losses):
                    found = torch.autograd.grad(
                        loss, [each.outputs for each in passes], retain_graph=number + 1 < len(losses)
                    )
                    for each, gradient in zip(passes, found, strict=True):
                        each.gradients.append(gradient)
        finally:
            for hook in hooks:
                hook.remove()
        for each in passes:
            each.outputs = each.outputs.detach()
        return passes

    @torch.no_grad()
    def estimate(self, layer: int) -> float:
        """Nats a token that the model loses with a layer's weights as they are now, all others as they were."""
        squares = []
        with evaluation_mode(self._model):
            for passes in self._passes:
                at = passes[layer]
                outputs = self._layers[layer](at.hidden, **at.keywords)
                error = (outputs[0] if isinstance(outputs, tuple) else outputs) - at.outputs
                squares += [float((gradient * error).sum()) ** 2 for gradient in at.gradients]
        return sum(squares) / len(squares) / 2 / self._length


def _detach(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_detach, value))
    return value.detach() if isinstance(value, Tensor) else value
