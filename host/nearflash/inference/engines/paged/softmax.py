"""Softmax attention in float32: over keys that come in parts, with softcap and sinks.

Sources: online softmax (Milakov and Gimelshein, arXiv 1805.02867); softcap (Gemma 2, arXiv 2408.00118); sinks
(gpt-oss).
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["AttentionForm", "OnlineSoftmax", "cap", "with_sinks"]


_Sinks = TypeVar("_Sinks")


@dataclass(frozen=True)
class AttentionForm(Generic[_Sinks]):
    """The form of the softmax."""

    scaling: float
    softcap: float | None
    sinks: _Sinks | None
    """(kv_heads, g), an array or a tensor."""


class OnlineSoftmax:
    """Attention of scaled q (H, t, g, d), of tokens S - t to S - 1, to all tokens up to each; keys come part by part.

    sinks (H, g): logits that join the softmax and have no value. visible (t, S): which tokens each query attends to, in
    place of all up to itself; the output of one that sees none is 0.
    """

    def __init__(
        self, q: Tensor, tokens: int, softcap: float | None, sinks: Tensor | None, visible: Tensor | None = None
    ) -> None:
        heads, new, group, dim = q.shape
        self._shape, self._softcap = q.shape, softcap
        self._q = q.reshape(heads, new * group, dim)
        self._place = torch.arange(tokens - new, tokens, device=q.device).repeat_interleave(group)[:, None]
        self._hidden = None if visible is None else ~visible.repeat_interleave(group, dim=0)
        if sinks is None:  # no infinity: a part may be hidden as a whole
            lowest = torch.finfo(q.dtype).min
            self._largest, self._sum = q.new_full((heads, new * group, 1), lowest), q.new_zeros(())
        else:
            self._largest, self._sum = sinks[:, None].expand(heads, new, group).reshape(heads, -1, 1), q.new_ones(())
        self._out = q.new_zeros(heads, new * group, dim)

    def add(self, k: Tensor, v: Tensor, first: int) -> None:
        """Tokens first, first + 1, …: k and v (H, T, d). Those of the first call begin with token 0."""
        if not k.shape[1]:
            return
        logits = cap(self._q @ k.mT, self._softcap)
        if self._hidden is not None:
            logits = logits.masked_fill(self._hidden[:, first : first + k.shape[1]], -torch.inf)
        elif first + k.shape[1] > int(self._place[0]) + 1:
            later = torch.arange(first, first + k.shape[1], device=k.device) > self._place
            logits = logits.masked_fill(later, -torch.inf)
        largest = torch.maximum(self._largest, logits.amax(dim=-1, keepdim=True))
        weights, kept = (logits - largest).exp(), (self._largest - largest).exp()
        self._out = self._out * kept + weights @ v
        self._sum = self._sum * kept + weights.sum(dim=-1, keepdim=True)
        self._largest = largest

    def result(self) -> Tensor:
        """(H, t, g, d)."""
        return (self._out / self._sum.clamp_min(torch.finfo(self._out.dtype).tiny)).reshape(self._shape)


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap·tanh(logits / softcap); as they are without softcap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def with_sinks(out: Tensor, log_sum: Tensor, alpha: Tensor | None, sinks: Tensor | None) -> Tensor:
    """The output (H, g, d) where sinks (H, g) join the softmax.

    log_sum (H, g, 1): logarithm of the sum of the exponentials of the chosen tokens' logits, which are the share alpha
    (None: all) of that over all tokens.
    """
    if sinks is None:
        return out
    every = log_sum if alpha is None else log_sum - alpha.log()
    return out * torch.sigmoid(every - sinks[..., None])
