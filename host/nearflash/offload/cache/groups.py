"""Keys and values in groups of 64 codes of 4 bits.

Source: FlexGen (arXiv 2303.06865), section 4.4. A constant group has the scale 0, and comes back as it was.
"""

import torch
from torch import Tensor

from nearflash.abi.bitmap import SCALE_COLUMNS
from nearflash.abi.errors import NonFiniteError

__all__ = ["decode", "encode", "token_bytes"]

_TOP = 15
_HALF_MAX = 65504.0


def token_bytes(dim: int, dtype: torch.dtype, bits: int) -> int:
    """Bytes of a key or value of `dim` elements at rest."""
    if bits == 16:
        return dim * dtype.itemsize
    groups = -(-dim // SCALE_COLUMNS)
    return groups * (SCALE_COLUMNS // 2 + 4)


def encode(states: Tensor) -> Tensor:
    """Keys or values (..., dim) as bytes (..., token_bytes): codes of each group of 64, then scales and minima (fp16).

    Raises NonFiniteError for NaN or infinity, and beyond fp16.
    """
    dim = states.shape[-1]
    groups = -(-dim // SCALE_COLUMNS)
    values = states.float()
    if dim % SCALE_COLUMNS:
        values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], -dim % SCALE_COLUMNS)], dim=-1)
    values = values.unflatten(-1, (groups, SCALE_COLUMNS))
    low, high = values.amin(dim=-1).half(), values.amax(dim=-1)
    scale = ((high - low.float()) / _TOP).half()
    if not bool((low.isfinite() & scale.isfinite()).all()):
        raise NonFiniteError(f"keys and values must be finite and at most {_HALF_MAX:g} for 4 bits")
    wide = scale.float()[..., None]
    steps = torch.where(wide > 0, (values - low.float()[..., None]) / wide, torch.zeros_like(values))
    codes = steps.round().clamp(0, _TOP).to(torch.uint8).flatten(-2)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    scales = torch.stack([scale, low], dim=-1).flatten(-2)
    return torch.cat([pairs, scales.view(torch.uint8)], dim=-1)


def decode(data: Tensor, out: Tensor) -> None:
    """Write the keys or values of bytes that `encode` gave to `out` (..., dim)."""
    dim = out.shape[-1]
    groups = -(-dim // SCALE_COLUMNS)
    pairs = data[..., : groups * SCALE_COLUMNS // 2]
    scales = data[..., groups * SCALE_COLUMNS // 2 :].contiguous().view(torch.float16).float()
    scales = scales.unflatten(-1, (groups, 2))
    codes = torch.stack([pairs & _TOP, pairs >> 4], dim=-1).flatten(-2).unflatten(-1, (groups, SCALE_COLUMNS))
    values = codes.float() * scales[..., :1] + scales[..., 1:]
    out.copy_(values.flatten(-2)[..., :dim])
