"""Attention by an engine, under the name `near_storage` in transformers' registries.

Both registries hold it: of functions, and of masks (without the second a model would be given no mask, and prefill lose
causality). The name must hold none of `flash`, `sdpa`, `flex_attention`, `/`, `|`, nor be `eager`: transformers takes
a name with `flash` for a kernel of FlashAttention, wherever in the name that stands, and the others for its own.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.cache.decoder import check_decoder
from nearflash.inference.cache.guard import guard
from nearflash.inference.cache.predicted import RECORD, predict_for_engines
from nearflash.support.vector_math import prepare_vector_math

__all__ = ["NAME", "attach", "near_storage_attention"]

NAME = "near_storage"
"""For `attn_implementation`."""


def near_storage_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query (batch, heads, t, d) -> (batch, t, heads, d).

    Keys of a NearflashCache's flash layer go to its engine, which attends to what is stored; new keys that have
    `attend_there` are attended to by that function, of the module's arguments above; prefill, and keys of any other
    cache, are computed here. softcap: logits become softcap·tanh(logit/softcap) (Gemma 2). s_aux (heads,): logits
    that join the softmax and have no value, attention sinks (gpt-oss). Raises UnsupportedError for attention that is
    more than that over all tokens before, and what the cache and its engine raise.
    """
    if (record := kwargs.pop(RECORD, None)) is not None:
        record(query)
    if isinstance(key, Tensor) and (attend_there := getattr(key, "attend_there", None)) is not None:
        return attend_there(module, query, key, value, attention_mask, scaling, softcap, s_aux), None
    tokens = getattr(key, "near_storage", None)
    if tokens is not None:
        _check_flash_layer(module, kwargs)
        columns = tokens.layer.cache.columns_of(attention_mask, tokens.layer.place, query.shape[0], query.shape[2])
        if not isinstance(key, Tensor):
            return tokens.attend(query, columns, scaling, softcap, s_aux).transpose(1, 2).contiguous(), None
        tokens.append_in_background(columns.kept)
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return _attention(query, key, value, attention_mask, scaling, softcap, s_aux).transpose(1, 2).contiguous(), None


def attach(model: Any) -> Any:
    """The model, set to attend near storage where a NearflashCache is passed to it.

    Raises UnsupportedError, saying why, for a model that it cannot serve, or a compiled one.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise UnsupportedError("model must be attached before torch.compile, and called uncompiled with KV on flash")
    check_decoder(model)
    prepare_vector_math()
    model.set_attn_implementation(NAME)
    predict_for_engines(model)
    return guard(model)


def _check_flash_layer(module: torch.nn.Module, options: dict[str, Any]) -> None:
    if options.get("sliding_window") is not None:
        raise UnsupportedError(
            "attention near storage must be over all tokens, not a sliding window: pass the model's configuration, "
            "NearflashCache(engine, model.config)"
        )
    if options.get("position_bias") is not None or not getattr(module, "is_causal", True):
        raise UnsupportedError("attention near storage must be causal, without position_bias")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention with softcap and sinks, (batch, heads, t, d), in fp32; without a mask it is causal."""
    batch, heads, new, dim = query.shape
    kv_heads, total = key.shape[1], key.shape[2]
    q = query.float().reshape(batch, kv_heads, heads // kv_heads * new, dim)
    logits = (q @ key.float().mT).reshape(batch, heads, new, total) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is None:
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    lowest = torch.finfo(logits.dtype).min
    logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, new, 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., :total].reshape(batch, kv_heads, -1, total)
    return (weights @ value.float()).reshape(batch, heads, new, -1).to(query.dtype)


AttentionInterface.register(NAME, near_storage_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
