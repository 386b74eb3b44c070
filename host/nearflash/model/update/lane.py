"""Reference of the updater lane: one Adam or AdamW step, equal to the gateware to the bit.

Written from the formulas, operation by operation, and independent of the lane's program bits. With the scalars
s = step_size, c = bias_correction2_sqrt (deepspeed: 1/c is the scalar) and w = decay of abi.rules.adam, rn one rounding
to fp32 and fma one rounding of a product and a sum:

    ieee         m = rn(rn(b1·m) + rn((1-b1)·g))     v = rn(rn(b2·v) + rn(rn((1-b2)·g)·g))
                 d = rn(rn(sqrt(v)/c) + eps)         p = rn(p1 - rn(s·rn(m/d)))
    torch_fused  m = fma(1-b1, rn(g - m), m)         v = fma(rn((1-b2)·g), g, rn(b2·v))
                 d = rn(rn(sqrt(v)/c) + eps)         p = rn(p1 - rn(rn(s·m)/d))
    deepspeed    m = fma(g, 1-b1, rn(b1·m))          v = fma(rn(g·g), 1-b2, rn(b2·v))
                 d = fma(sqrt(v), 1/c, eps)          p = fma(rn(m/d), -s, p1)

Weight decay, when it is not zero: AdamW makes p1 = rn(p·w) (ieee, torch_fused) or fma(p, w, p) (deepspeed). Adam with
L2 leaves p1 = p and first makes g = rn(g + rn(w·p)) (ieee) or fma(p, w, g) (torch_fused, deepspeed).

Numerics: round to nearest even, subnormals kept, every NaN result is the canonical one. A non-finite gradient is
counted and computed with, as IEEE 754 says.
Source: torch 2.13's fused CPU kernel (bit-equal on tensors of a multiple of 16 elements), DeepSpeed's CPU Adam.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.commands import CopyFormat
from nearflash.abi.errors import FormatError, ShapeError
from nearflash.abi.formats import BF16, FP16, FP32
from nearflash.abi.rules import AdamStep, Profile
from nearflash.model.fp.convert import to_bf16, to_fp16
from nearflash.model.fp.muladd import fma

__all__ = ["Updated", "adam_step", "low_precision"]

F32 = NDArray[np.float32]
BLOCK_PARAMS = 16384
"""Parameters per pass: temporaries then stay in the second-level cache."""


@dataclass
class Updated:
    """Result of a step over n parameters."""

    p: F32
    m: F32
    v: F32
    copy: NDArray[np.uint16] | None
    """Bit patterns of the fp16 or bf16 copy of p, (n,); None without a copy."""
    nonfinite_gradients: int = 0
    copy_overflows: int = 0
    """Finite parameters whose copy is infinite."""


def adam_step(adam: AdamStep, g: F32, p: F32, m: F32, v: F32, copy: CopyFormat = CopyFormat.NONE) -> Updated:
    """One step over n parameters: g, p, m, v are fp32, (n,); the inputs stay as they are.

    Raises FormatError, ShapeError for other arrays.
    """
    for name, array in {"g": g, "p": p, "m": m, "v": v}.items():
        if array.dtype != np.float32:
            raise FormatError(f"{name} must be float32, not {array.dtype}")
        if array.ndim != 1 or array.shape != g.shape:
            raise ShapeError(f"{name} must have the shape ({g.size},), not {array.shape}")
    new = Updated(np.empty_like(p), np.empty_like(m), np.empty_like(v), np.empty(p.size, np.uint16) if copy else None)
    for start in range(0, g.size, BLOCK_PARAMS):
        block = slice(start, start + BLOCK_PARAMS)
        with np.errstate(all="ignore"):
            results = _step(adam, g[block], p[block], m[block], v[block])
        new.p[block], new.m[block], new.v[block] = (_one_nan(x) for x in results)
        new.nonfinite_gradients += int(np.count_nonzero(~np.isfinite(g[block])))
        if new.copy is not None:
            new.copy[block], overflows = low_precision(new.p[block], copy)
            new.copy_overflows += overflows
    return new


def low_precision(p: F32, copy: CopyFormat) -> tuple[NDArray[np.uint16], int]:
    """Bit patterns of p rounded to fp16 or bf16, and how many finite elements became infinite."""
    number_format = copy.number_format
    if number_format not in (FP16, BF16):
        raise FormatError(f"copy must be FP16 or BF16, not {copy!r}")
    bits = to_fp16(p) if number_format is FP16 else to_bf16(p)
    infinity = ((1 << number_format.exponent_bits) - 1) << number_format.mantissa_bits
    overflows = np.count_nonzero(((bits & 0x7FFF) == infinity) & np.isfinite(p))
    return bits, int(overflows)


def _step(adam: AdamStep, g: F32, p: F32, m: F32, v: F32) -> tuple[F32, F32, F32]:
    if adam.weight_decay and adam.decoupled:
        p = _decayed_parameter(adam, p)
    elif adam.weight_decay:
        g = _decayed_gradient(adam, g, p)
    steps: dict[Profile, Any] = {
        Profile.IEEE: _ieee,
        Profile.TORCH_FUSED: _torch_fused,
        Profile.DEEPSPEED: _deepspeed,
    }
    new: tuple[F32, F32, F32] = steps[adam.profile](adam, g, p, m, v)
    return new


def _decayed_parameter(adam: AdamStep, p: F32) -> F32:
    decay = np.float32(adam.decay)
    return fma(p, decay, p) if adam.profile is Profile.DEEPSPEED else p * decay


def _decayed_gradient(adam: AdamStep, g: F32, p: F32) -> F32:
    decay = np.float32(adam.decay)
    return g + decay * p if adam.profile is Profile.IEEE else fma(p, decay, g)


def _ieee(adam: AdamStep, g: F32, p: F32, m: F32, v: F32) -> tuple[F32, F32, F32]:
    m = np.float32(adam.beta1) * m + np.float32(adam.one_minus_beta1) * g
    v = np.float32(adam.beta2) * v + (np.float32(adam.one_minus_beta2) * g) * g
    return p - np.float32(adam.step_size) * (m / _denominator(adam, v)), m, v


def _torch_fused(adam: AdamStep, g: F32, p: F32, m: F32, v: F32) -> tuple[F32, F32, F32]:
    m = fma(np.float32(adam.one_minus_beta1), g - m, m)
    v = fma(np.float32(adam.one_minus_beta2) * g, g, np.float32(adam.beta2) * v)
    return p - (np.float32(adam.step_size) * m) / _denominator(adam, v), m, v


def _deepspeed(adam: AdamStep, g: F32, p: F32, m: F32, v: F32) -> tuple[F32, F32, F32]:
    m = fma(g, np.float32(adam.one_minus_beta1), np.float32(adam.beta1) * m)
    v = fma(g * g, np.float32(adam.one_minus_beta2), np.float32(adam.beta2) * v)
    denominator = fma(np.sqrt(v), np.float32(adam.inverse_bias_correction2_sqrt), np.float32(adam.eps))
    return fma(m / denominator, np.float32(-adam.step_size), p), m, v


def _denominator(adam: AdamStep, v: F32) -> F32:
    root: F32 = np.sqrt(v)
    return root / np.float32(adam.bias_correction2_sqrt) + np.float32(adam.eps)


def _one_nan(x: F32) -> F32:
    return np.where(np.isnan(x), np.uint32(FP32.canonical_nan).view(np.float32), x)
