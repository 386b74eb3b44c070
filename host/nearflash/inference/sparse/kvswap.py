"""KVSwap's choice of KV page groups (arXiv 2511.11907), the same for all KV heads of a layer.

    K of all KV heads of a token (H·d) ── A (H·d, r), fixed ──► index in memory, r values a token
    predicted queries (nearflash.inference.cache.predicted) ── A ──► scores, the mean over all heads
    ──► the largest of a group's tokens ──► the groups with the largest, the same for all heads, read from the drive

A is of each layer the first r left singular vectors of K (after rotation, all heads of a token as one vector). The
first layer has no layer before it and reads all. Letters: H KV heads, P query positions, S tokens, G groups, d head
dimension.
"""

import torch
from torch import Tensor

from nearflash.inference.sparse.selection import choose

__all__ = ["choose_groups", "find_projection", "reduce_queries", "score_groups", "token_rows"]


def token_rows(keys: Tensor) -> Tensor:
    """K (H, S, d) as a row of all heads for each token, (S, H·d)."""
    return keys.transpose(0, 1).flatten(1)


def find_projection(gram: Tensor, rank: int) -> Tensor:
    """A (H·d, rank) fp32 of rows' products `rows.T @ rows` (H·d, H·d) fp64: the left singular vectors of K's transpose
    with the largest singular values.
    """
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].float()


def reduce_queries(queries: Tensor, projection: Tensor, kv_heads: int) -> Tensor:
    """Queries (heads, P, d), those of a KV head together, as (P, r): their mean over each KV head's, by A."""
    means = queries.unflatten(0, (kv_heads, -1)).mean(dim=1)
    return torch.einsum("hpd,hdr->pr", means, projection.view(kv_heads, means.shape[-1], -1))


def score_groups(reduced: Tensor, index: Tensor, group_tokens: int) -> Tensor:
    """The largest score of each group's tokens, (P, G): reduced queries (P, r), index (S, r)."""
    scores = reduced @ index.T
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % group_tokens), value=-torch.inf)
    return padded.unflatten(1, (-1, group_tokens)).amax(dim=-1)


def choose_groups(scores: Tensor, groups: Tensor, count: Tensor, window_start: Tensor | None = None) -> Tensor:
    """The `count` (P,) groups with the largest scores (P, G) of the first `groups` (P,): bool (P, G).

    window_start (P,): groups from these on come first.
    """
    place = torch.arange(scores.shape[1])
    if window_start is not None:
        scores = scores.masked_fill(place >= window_start.unsqueeze(-1), torch.inf)
    scores = scores.masked_fill(place >= groups.unsqueeze(-1), -torch.inf)
    return choose(scores, torch.minimum(count, groups))
