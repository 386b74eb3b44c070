"""Attention by an engine, under the name `near_storage` in transformers' registries.

Both registries hold it: of functions, and of masks (without the second a model would be given no mask, and prefill lose
causality). The name must hold none of `flash`, `sdpa`, `flex_attention`, `/`, `|`, nor be `eager`: transformers takes
a name with `flash` for a kernel of FlashAttention, wherever in the name that stands, and the others for its own.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from nearflash.abi.errors import UnsupportedError

__all__ = ["NAME", "attach", "near_storage_attention"]

NAME = "near_storage"
"""For `attn_implementation`."""

_REFUSED = ("position_bias", "s_aux", "sliding_window", "softcap")


def near_storage_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query (batch, heads, t, d) -> (batch, t, heads, d).

    Keys of a NearflashCache go to its engine, and decode attends there; prefill, and keys of any other cache, are for
    scaled_dot_product_attention. Raises UnsupportedError for attention that is more than a softmax over all tokens
    before, and what the cache and its engine raise.
    """
    tokens = getattr(key, "near_storage", None)
    if tokens is not None:
        used = [name for name in _REFUSED if kwargs.get(name) is not None]
        if used or not getattr(module, "is_causal", True):
            raise UnsupportedError(f"attention near storage must be causal, without {', '.join(used) or 'exception'}")
        kept = _kept(attention_mask, query.shape[2])
        if not isinstance(key, torch.Tensor):
            return tokens.attend(query, kept, scaling).transpose(1, 2).contiguous(), None
        tokens.append_in_background(kept)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def attach(model: Any) -> Any:
    """The model, set to attend near storage where a NearflashCache is passed to it.

    Raises UnsupportedError for a model with other than full causal attention, or a compiled one.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise UnsupportedError("model must be attached before torch.compile, and called uncompiled with KV on flash")
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if model.config.is_encoder_decoder or kinds != {"full_attention"} or window is not None:
        raise UnsupportedError(
            f"model must be a decoder with full attention in every layer, not {model.config.model_type!r} "
            f"with {', '.join(sorted(kinds))}, window {window}"
        )
    model.set_attn_implementation(NAME)
    return model


def _kept(mask: torch.Tensor | None, new: int) -> torch.Tensor | None:
    """(batch, new): new tokens that the last query sees; None where it sees all."""
    if mask is None:
        return None
    seen = mask[:, 0, -1, -new:]
    seen = seen if seen.dtype == torch.bool else seen == 0
    return None if bool(seen.all()) else seen


AttentionInterface.register(NAME, near_storage_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
