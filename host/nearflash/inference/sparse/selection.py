"""The choice of channels and of entries in torch, for many heads and query positions at once
(docs/contracts/attention.md, 1).

Keys are fp16, as the kernel ranks them, and the lower index goes first among equals. An entry that does not exist
for a query position has the key -inf.
"""

import torch
from torch import Tensor

__all__ = ["choose", "logit_scales", "top_channels"]

_MASS_ONE = 1 << 16


def top_channels(q: Tensor, count: int) -> Tensor:
    """The `count` channels with the largest sum of |q| (..., g, d) over the query heads: (..., d) bool."""
    sums = (q.abs().double().sum(dim=-2) / 8).half().float()
    order = sums.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def logit_scales(q: Tensor, channels: Tensor, scale: float) -> Tensor:
    """Factors from approximate scores to logits, (..., g): `scale`, corrected for the share of |q| in the channels."""
    size = q.abs()
    every, chosen = size.sum(dim=-1), (size * channels.unsqueeze(-2)).sum(dim=-1)
    return scale * (every / chosen).sqrt().where(chosen > 0, 1.0)


def choose(keys: Tensor, budget: Tensor, weights: Tensor | None = None, mass: int = 0) -> Tensor:
    """The `budget` (...) entries with the largest keys (..., E): bool (..., E).

    With `mass` (in 2^-16) as many as hold that share of the `weights` (..., E) by falling key, all with the last key
    needed, at most `budget`.
    """
    order = keys.argsort(dim=-1, descending=True, stable=True)
    count = budget.unsqueeze(-1)
    if mass and weights is not None:
        reached = weights.gather(-1, order).cumsum(dim=-1)
        short = (reached < mass / _MASS_ONE * weights.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True)
        last = keys.gather(-1, order.gather(-1, short.clamp(max=keys.shape[-1] - 1)))
        count = torch.minimum(count, (keys >= last).sum(dim=-1, keepdim=True))
    places = torch.arange(keys.shape[-1], device=keys.device)
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, order, places < count)
