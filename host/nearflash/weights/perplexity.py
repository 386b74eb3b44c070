"""Perplexity of a language model on texts."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nearflash.abi.errors import CommandError

__all__ = ["hold_out", "perplexity", "windows"]

_HELD_OUT = 8
"""Of so many windows one is kept for the perplexity."""


def windows(texts: Iterable[Sequence[int]], length: int) -> Tensor:
    """Token ids of texts cut into windows, (n, length), what is left of each text left out.

    Raises CommandError for fewer than two.
    """
    windows_of_texts = [torch.tensor(ids)[: len(ids) // length * length].reshape(-1, length) for ids in texts]
    together = torch.cat(windows_of_texts) if windows_of_texts else torch.empty(0, length)
    if len(together) < 2:
        raise CommandError(f"texts must have two windows of {length} tokens or more, not {len(together)}")
    return together.to(torch.int64)


def hold_out(tokens: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Windows (n, length) for calibration, `most` at most and from all over, and others for the perplexity."""
    kept = torch.zeros(len(tokens), dtype=torch.bool)
    kept[_HELD_OUT - 1 :: _HELD_OUT] = True
    if not kept.any():
        kept[-1] = True
    others = tokens[~kept]
    return others[torch.linspace(0, len(others) - 1, min(most, len(others))).round().long()], tokens[kept]


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor, cache: Callable[[], Any] | None = None) -> float:
    """exp of the mean cross entropy, in nats, of each token but the first of its window; tokens: int64 (n, length).

    cache: gives a cache of transformers' for each window, whose keys and values attention uses; by default none.
    """
    total = 0.0
    for window in tokens:
        options = {"use_cache": False} if cache is None else {"past_key_values": cache()}
        logits = model(window[None].to(model.device), **options).logits[0, :-1]
        total += float(cross_entropy(logits.float(), window[1:].to(logits.device), reduction="sum"))
    return math.exp(total / (tokens.shape[0] * (tokens.shape[1] - 1)))
