"""The quantised index in torch: K as the embedding-indexed copy has it, equal to what devices store.

zero is a channel's smallest element in the block, scale = fp16((largest - smallest) / levels), code = (K - zero) /
scale rounded to nearest even and held in 0 .. levels (docs/contracts/attention.md, 1 and 2).
"""

import torch
from torch import Tensor

from nearflash.abi.attention.pages import IndexFormat

__all__ = ["index_keys"]


def index_keys(k: Tensor, block_tokens: int, form: IndexFormat) -> Tensor:
    """zero + scale·code of k (..., S, d), fp16 values, for every whole block; the suffix as it is. fp32, shape of k."""
    covered = k.shape[-2] // block_tokens * block_tokens
    wide = k.float()
    if form is IndexFormat.FP16 or not covered:
        return wide
    levels = (1 << form.bits) - 1
    blocks = k[..., :covered, :].double().unflatten(-2, (-1, block_tokens))
    zero = blocks.amin(dim=-2, keepdim=True)
    scale = ((blocks.amax(dim=-2, keepdim=True) - zero) / levels).half().double()
    steps = (blocks - zero) / scale.where(scale > 0, torch.inf)
    values = zero + scale * steps.round().clamp(0, levels)
    return torch.cat([values.flatten(-3, -2).float(), wide[..., covered:, :]], dim=-2)
