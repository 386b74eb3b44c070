"""Tokens drawn, by temperature, top-p and the like, each prompt with random numbers of its own.

The token with the largest of logit / temperature + Gumbel noise has the distribution of the softmax. What is drawn for
a prompt does not depend on the batches it is computed in, nor on what was resumed. Source: Gumbel (1954);
the rest is transformers'.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from nearflash.inference.settings import GenerationSettings

__all__ = ["GumbelSampler", "warpers"]

_MIX = 1_000_003


class GumbelSampler(LogitsProcessor):
    """Adds the noise of a batch's rows, so that the greedy choice is a drawn one.

    prompts: the number of each row. warp: what scores (batch, vocabulary) are changed by before.
    """

    def __init__(self, prompts: Sequence[int], warp: Callable[[Tensor, Tensor], Tensor], seed: int) -> None:
        self._warp = warp
        self._generators = [torch.Generator().manual_seed(seed * _MIX + prompt) for prompt in prompts]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (batch, vocabulary) with noise."""
        scores = self._warp(input_ids, scores.float())
        noise = torch.stack([
            torch.empty(scores.shape[1]).exponential_(generator=generator) for generator in self._generators
        ])  # fmt: skip
        return scores - noise.log().to(scores.device)


def warpers(model: Any, settings: GenerationSettings) -> Callable[[Tensor, Tensor], Tensor]:
    """transformers' changes of scores before it draws: temperature, top-k, top-p and the like, as settings state."""
    names = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
    config = GenerationConfig(do_sample=True, **{name: settings.fields[name] for name in names})
    processor: Callable[[Tensor, Tensor], Tensor] = model._get_logits_processor(config, device=model.device)
    return processor
