"""The choice of dims and of entries in torch, for many heads and query positions at once
(docs/contracts/attention.md, 1).

Keys are fp16, as the kernel ranks them, and the lower index goes first among equals. An entry that does not exist
for a query position has the key -inf.
"""

import torch
from torch import Tensor

__all__ = ["choose", "logit_scales", "top_dims"]

_MASS_ONE = 1 << 16


def top_dims(q: Tensor, count: int) -> Tensor:
    """The `count` dims with the largest sum of |q| (..., g, d) over the query heads: (..., d) bool."""
    sums = (q.abs().double().sum(dim=-2) / 8).half().float()
    order = sums.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def logit_scales(q: Tensor, dims: Tensor, scale: float) -> Tensor:
    """Factors from approximate scores to logits, (..., g): `scale`, corrected for the share of |q| in the dims."""
    size = q.abs()
    every, chosen = size.sum(dim=-1), (size * dims.unsqueeze(-2)).sum(dim=-1)
    return scale * (every / chosen).sqrt().where(chosen > 0, 1.0)


def choose(keys: Tensor, top_k: Tensor, weights: Tensor | None = None, top_p: int = 0) -> Tensor:
    """The `top_k` (...) entries with the largest keys (..., E): bool (..., E).

    With `top_p` (in 2^-16) as many as hold that share of the `weights` (..., E) by falling key, all with the last key
    needed, at most `top_k`.
    """
    order = keys.argsort(dim=-1, descending=True, stable=True)
    count = top_k.unsqueeze(-1)
    if top_p and weights is not None:
        reached = weights.gather(-1, order).cumsum(dim=-1)
        short = (reached < top_p / _MASS_ONE * weights.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True)
        last = keys.gather(-1, order.gather(-1, short.clamp(max=keys.shape[-1] - 1)))
        count = torch.minimum(count, (keys >= last).sum(dim=-1, keepdim=True))
    places = torch.arange(keys.shape[-1], device=keys.device)
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, order, places < count)
