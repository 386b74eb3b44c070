"""Other choices of tokens, to compare with: Quest's pages, H2O's heavy hitters, a local window with sinks.

Each gives the tokens that a position attends to, (N, P, S) bool, for `attend_chosen`. Letters as in attention.py.
Sources: Quest (arXiv 2406.10774), H2O (arXiv 2306.14048), StreamingLLM (arXiv 2309.17453).
"""

import torch
from torch import Tensor

from nearflash.inference.sparse.selection import choose

__all__ = ["heavy_hitters", "local_window", "quest_pages"]


def local_window(tokens: Tensor, every: int, count: Tensor, sinks: int = 0) -> Tensor:
    """The first `sinks` tokens and the last ones, `count` (P,) in all, of S = `every`: (P, S)."""
    position = torch.arange(every)
    seen = tokens.unsqueeze(-1)
    return (position < seen) & ((position < sinks) | (position >= seen - (count.unsqueeze(-1) - sinks)))


def quest_pages(q: Tensor, k: Tensor, tokens: Tensor, count: Tensor, page_tokens: int) -> Tensor:
    """The `count` (P,) pages of `page_tokens` tokens with the largest bound of q·K, summed over the query heads.

    The bound is sum over d of max(q·min, q·max), with a page's least and largest K; the page of the current token is
    always taken.
    """
    pages = torch.nn.functional.pad(k, (0, 0, 0, -k.shape[1] % page_tokens)).unflatten(1, (-1, page_tokens))
    least, largest = (x.transpose(1, 2) for x in (pages.amin(dim=2), pages.amax(dim=2)))
    keys = q.relu().sum(dim=2) @ largest - (-q).relu().sum(dim=2) @ least
    current = ((tokens - 1) // page_tokens).unsqueeze(-1)
    page = torch.arange(keys.shape[-1])
    keys = keys.masked_fill(page == current, torch.inf).masked_fill(page > current, -torch.inf)
    mask = choose(keys, count.expand(keys.shape[:-1])).repeat_interleave(page_tokens, dim=-1)[..., : k.shape[1]]
    return mask & (torch.arange(k.shape[1]) < tokens.unsqueeze(-1))


def heavy_hitters(history: Tensor, probabilities: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
    """Half of `count` (P,) the last tokens, half those with the largest probability so far.

    history (N, S): probability that each token had before the first position, summed; probabilities (N, P, g, S) of
    dense attention. Nothing is evicted for good, so this is at least as good as H2O with that budget.
    """
    received = probabilities.sum(dim=2)
    keys = history.unsqueeze(1) + received.cumsum(dim=1) - received
    position = torch.arange(keys.shape[-1])
    seen = tokens.unsqueeze(-1)
    keys = keys.masked_fill(position >= seen - (count // 2).unsqueeze(-1), torch.inf)
    keys = keys.masked_fill(position >= seen, -torch.inf)
    return choose(keys, count.expand(keys.shape[:-1])) & (position < seen)
