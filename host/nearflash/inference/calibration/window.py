"""The loss of a text's last tokens with their attention replaced; that of all tokens before is dense.

    prefix ─► dense attention ─► K, V ─┐
                            window ────┴─► every layer's attention by `Attend` ─► logits, loss, flash bytes

Every position of the window attends to the tokens up to it, as in decode, and later layers see what the earlier ones
made of that. K and V count as stored, in fp16.
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.cache.attention import near_storage_attention
from nearflash.inference.cache.decoder import flash_layers
from nearflash.inference.cache.predicted import RECORD, predict_queries

__all__ = ["NAME", "Attend", "FlashUse", "HeadWindow", "Prefix"]

NAME = "replaced"
"""For `attn_implementation`: dense, unless the model is called with `attend`."""
_CHUNK = 512
_HISTORY_STEP = 8


@dataclass(frozen=True)
class FlashUse:
    """Flash bytes of a KV head as fractions of its K and V in fp16; means over positions and heads."""

    index: float = 0.0
    suffix: float = 0.0
    """K of the tokens after the last whole index block, for the scan."""
    gather: float = 0.0
    memory: float = 0.0
    """Read in the device's memory, not on flash: K of the unindexed suffix for the scan, then its chosen tokens."""
    pages: float = 0.0
    """All that is read on flash, where pages can only be read whole."""

    @property
    def all(self) -> float:
        """All that is read on flash, by codewords."""
        return self.index + self.suffix + self.gather

    @classmethod
    def mean(cls, uses: list[Self]) -> Self:
        """Mean of several heads or texts."""
        return cls(*(sum(getattr(use, field.name) for use in uses) / len(uses) for field in fields(cls)))


@dataclass(frozen=True)
class HeadWindow:
    """Tensors that one KV head attends with: N = 1, P positions (shapes as in nearflash.inference.sparse.attention)."""

    layer: int
    """Of those on flash: layers with full attention."""
    head: int
    q: Tensor
    """(1, P, g, d)."""
    k: Tensor
    """(1, S, d)."""
    v: Tensor
    tokens: Tensor
    """Tokens that each position sees, (P,)."""
    scaling: float
    history: Tensor | None
    """Probability that each token of the prefix had there, summed over every eighth position and the group, (1, S)."""
    keys: Tensor | None = None
    """K of all KV heads of the layer, (KV heads, S, d)."""
    predicted: Tensor | None = None
    """Queries of all heads, (heads, P, d), by the layer before; None in the first one, and where nobody asks."""


Attend = Callable[[HeadWindow], tuple[Tensor, FlashUse]]
"""Output (1, P, g, d) and flash bytes of one KV head."""


class Prefix:
    """The dense beginning of a text: computed once, then continued with any tokens and any `Attend`.

    ids: token ids (S,). The model's attention must be NAME. Without `history` that of a HeadWindow is None.
    """

    def __init__(self, model: Any, ids: Tensor, *, history: bool = True) -> None:
        self._model, self._with_history, self.config = model, history, model.config
        self._history: dict[tuple[int, int], Tensor] = {}
        self._cache = DynamicCache(config=model.config)
        self._prefill(ids)

    @torch.no_grad()
    def _prefill(self, ids: Tensor) -> None:
        options = {"history": self._history, "prefix": len(ids)} if self._with_history else {}
        for part in ids.split(_CHUNK):
            self._model(part[None], past_key_values=self._cache, logits_to_keep=1, **options)

    def logits(
        self, window: Tensor, attend: Attend, *, gradients: bool = False, predicts: bool = False
    ) -> tuple[Tensor, FlashUse]:
        """Logits (P, vocabulary) after each token of the window (P,), and the flash bytes of all heads. predicts:
        `attend` gets predicted queries.
        """
        uses: list[FlashUse] = []
        places = {number: place for place, number in enumerate(flash_layers(self.config))}
        options = {"attend": attend, "uses": uses, "history": self._history, "places": places}
        watch = predict_queries(self._model) if predicts else nullcontext()
        crops = self._cache.is_croppable and not any(self._cache.is_sliding)
        # Windows of K and V, and recurrent states, cannot be cropped to where they were.
        cache = self._cache if crops else deepcopy(self._cache)
        with torch.set_grad_enabled(gradients), watch:
            done = self._model(window[None], past_key_values=cache, **options)
        if crops:
            cache.crop(-len(window))
        return done.logits[0], FlashUse.mean(uses)

    def loss(self, window: Tensor, attend: Attend, *, predicts: bool = False) -> tuple[float, FlashUse]:
        """Mean loss (nats) of the window's tokens but the first, each from those before it; flash bytes."""
        logits, use = self.logits(window, attend, predicts=predicts)
        return float(torch.nn.functional.cross_entropy(logits[:-1], window[1:])), use


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
    attend: Attend | None = None, history: dict[tuple[int, int], Tensor] | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' call: query (1, heads, P, d) -> (1, P, heads, d)."""
    if (record := options.get(RECORD)) is not None:
        record(query)
    positions, total = query.shape[2], key.shape[2]
    seen = torch.arange(total - positions + 1, total + 1)
    grouped = query[0].unflatten(0, (key.shape[1], -1)).transpose(1, 2)  # (KV heads, P, g, d)
    windowed = options.get("sliding_window") is not None
    if attend is None or windowed:
        if history is not None and not windowed:
            for head, q in enumerate(grouped):
                sums = history.setdefault((module.layer_idx, head), torch.zeros(1, options["prefix"]))
                sums[0, :total] += _column_sums(q[::_HISTORY_STEP] * scaling, key[0, head], seen[::_HISTORY_STEP])
        return near_storage_attention(module, query, key, value, mask, scaling, **options)
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise UnsupportedError("attention that is replaced must be without softcap and sinks")
    outs, predicted = [], options.get("predicted")
    for head, q in enumerate(grouped):
        heads = slice(head, head + 1)
        past = torch.nn.functional.pad(history[module.layer_idx, head], (0, positions)) if history else None
        given = HeadWindow(
            options["places"][module.layer_idx], head, q[None], key[0, heads], value[0, heads], seen, scaling, past,
            key[0], None if predicted is None else predicted[0],
        )  # fmt: skip
        out, use = attend(given)
        outs.append(out[0])
        options["uses"].append(use)
    return torch.cat(outs, dim=1)[None], None


def _column_sums(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Probability of each token (S,), summed over positions and query heads of q (P, g, d)."""
    hidden = (torch.arange(len(k)) >= seen.unsqueeze(-1)).unsqueeze(1)
    return (q @ k.T).masked_fill_(hidden, -torch.inf).softmax(dim=-1).sum(dim=(0, 1))


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
