"""Tokens drawn by temperature and top-p, each prompt with random numbers of its own.

The token with the largest of logit / temperature + Gumbel noise has the distribution of the softmax. What is drawn for
a prompt does not depend on the batches it is computed in, nor on what was resumed. Source: Gumbel (1954); top-p is
transformers' TopPLogitsWarper.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import TopPLogitsWarper

from nearflash.abi.errors import CommandError

__all__ = ["GumbelSampler"]

_MIX = 1_000_003


class GumbelSampler(LogitsProcessor):
    """Adds the noise of a batch's rows, so that the greedy choice is a drawn one. prompts: the number of each row.

    Raises CommandError for a temperature of 0 or less, or top_p outside of (0, 1].
    """

    def __init__(self, prompts: Sequence[int], temperature: float, top_p: float, seed: int) -> None:
        if not temperature > 0 or not 0 < top_p <= 1:
            raise CommandError(f"temperature must be above 0 and top_p in (0, 1], not {temperature!r} and {top_p!r}")
        self._temperature = temperature
        self._warp = TopPLogitsWarper(top_p) if top_p < 1 else None
        self._generators = [torch.Generator().manual_seed(seed * _MIX + prompt) for prompt in prompts]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (batch, vocabulary) with noise."""
        scores = scores.float() / self._temperature
        if self._warp is not None:
            scores = self._warp(input_ids, scores)
        noise = torch.stack([
            torch.empty(scores.shape[1]).exponential_(generator=generator) for generator in self._generators
        ])  # fmt: skip
        return scores - noise.log().to(scores.device)
