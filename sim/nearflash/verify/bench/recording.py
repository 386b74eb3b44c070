"""Queries, keys and values of a language model on a text, as attention sees them (after the rotary embedding)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RecordedHeads", "record"]

_NAME = "recorded"
"""Without "flash": transformers would look for a flash attention kernel."""


@dataclass(frozen=True)
class RecordedHeads:
    """Every KV head of every layer over one text of S tokens."""

    q: NDArray[np.float16]
    """Of the query positions, (positions, heads, g, d)."""
    k: NDArray[np.float16]
    """(heads, S, d)."""
    v: NDArray[np.float16]

    def at(self, position: int, tokens: int) -> "RecordedHeads":
        """The one query `position` (an index of q), with the `tokens` tokens up to it."""
        return RecordedHeads(self.q[position : position + 1], self.k[:, :tokens], self.v[:, :tokens])


def record(folder: Path, texts: NDArray[np.integer], tokens: tuple[int, ...]) -> Iterator[RecordedHeads]:
    """Record q, k and v of the model in `folder` at the last of S tokens, for each S of `tokens` and each text.

    texts: token ids (texts, at least max(tokens)). The model runs in fp32; q, k and v are rounded to fp16.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import sdpa_mask

    layers: dict[int, tuple[Any, Any, Any]] = {}
    last = [count - 1 for count in tokens]

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        grouped = q[0, :, last].unflatten(0, (k.shape[1], -1))  # (heads, g, positions, d)
        layers[module.layer_idx] = tuple(x.half().numpy() for x in (grouped.permute(2, 0, 1, 3), k[0], v[0]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=_NAME).eval()
    for text in texts:
        ids = torch.from_numpy(text[: max(tokens)].astype(np.int64))
        with torch.no_grad():
            model(ids[None], logits_to_keep=1)
        q, k, v = zip(*(layers[layer] for layer in sorted(layers)), strict=True)
        yield RecordedHeads(np.concatenate(q, axis=1), np.concatenate(k), np.concatenate(v))
