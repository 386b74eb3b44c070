"""Reference of the updater lane: one step of an optimizer, equal to the gateware to the bit.

Written from the formulas of docs/contracts/numerics.md, operation by operation, and independent of the lane's program
bits. State is fp32 here; formats that store fewer bits are nearflash.model.update.state.

Numerics: round to nearest even, subnormals kept, every NaN result is the canonical one. A non-finite gradient is
counted and computed with, as IEEE 754 says.
Source: torch 2.13's fused CPU kernels (bit-equal on tensors of a multiple of 16 elements), DeepSpeed's CPU Adam; Chen
et al. 2023 (Lion).
"""

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import FormatError, ShapeError
from nearflash.abi.formats import BF16, FP16, FP32
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, OptimizerStep, Profile, SgdStep
from nearflash.model.fp.convert import to_bf16, to_fp16
from nearflash.model.fp.muladd import fma
from nearflash.model.fp.sqrt import square_root

__all__ = ["Updated", "low_precision", "optimizer_step"]

F32: TypeAlias = NDArray[np.float32]
BLOCK_PARAMS = 16384
"""Parameters per pass: temporaries then stay in the second-level cache."""


@dataclass
class Updated:
    """Result of a step over n parameters."""

    state: dict[str, F32]
    """New p and the rule's m and v, (n,)."""
    copy: NDArray[np.uint16] | None
    """Bit patterns of the fp16 or bf16 copy of p, (n,); None without a copy."""
    nonfinite_gradients: int = 0
    copy_overflows: int = 0
    """Finite parameters whose copy is infinite."""

    @property
    def p(self) -> F32:
        """The new parameters."""
        return self.state["p"]

    @property
    def m(self) -> F32:
        """The new m. Raises KeyError where the rule has none."""
        return self.state["m"]

    @property
    def v(self) -> F32:
        """The new v. Raises KeyError where the rule has none."""
        return self.state["v"]


def optimizer_step(
    rule: OptimizerStep,
    g: F32,
    p: F32,
    m: F32 | None = None,
    v: F32 | None = None,
    copy: CopyFormat = CopyFormat.NONE,
) -> Updated:
    """One step over n parameters: g, p and the rule's state arrays are fp32, (n,); the inputs stay as they are.

    Raises FormatError, ShapeError for other arrays, or where one that the rule has is missing.
    """
    given = {"g": g, "p": p, "m": m, "v": v}
    inputs = {name: given[name] for name in ("g", "p", *rule.torch_names)}
    for name, array in inputs.items():
        if array is None or array.dtype != np.float32:
            raise FormatError(f"{name} must be float32, not {None if array is None else array.dtype}")
        if array.ndim != 1 or array.shape != g.shape:
            raise ShapeError(f"{name} must have the shape ({g.size},), not {array.shape}")
    state = {name: np.empty_like(p) for name in inputs if name != "g"}
    new = Updated(state, np.empty(p.size, np.uint16) if copy else None)
    for start in range(0, g.size, BLOCK_PARAMS):
        block = slice(start, start + BLOCK_PARAMS)
        with np.errstate(all="ignore"):
            results = _step(rule, *(array[block] for array in inputs.values() if array is not None))
        for array, result in zip(state.values(), results, strict=True):
            array[block] = _one_nan(result)
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


@singledispatch
def _step(rule: Any, g: F32, p: F32, *state: F32) -> tuple[F32, ...]:
    """New p, then the new state arrays in the rule's order."""
    raise TypeError(f"rule must be one of nearflash.abi.optimizers, not {rule!r}")


@_step.register
def _adam(adam: AdamStep, g: F32, p: F32, m: F32, v: F32) -> tuple[F32, ...]:
    if adam.weight_decay and adam.decoupled:
        p = _decay_parameter(adam, p)
    elif adam.weight_decay:
        g = _decay_gradient(adam, g, p)
    orders: dict[Profile, Any] = {
        Profile.IEEE: _ieee,
        Profile.TORCH_FUSED: _torch_fused,
        Profile.DEEPSPEED: _step_as_deepspeed,
    }
    new: tuple[F32, F32, F32] = orders[adam.profile](adam, g, p, m, v)
    return new


@_step.register
def _sgd(sgd: SgdStep, g: F32, p: F32, *state: F32) -> tuple[F32, ...]:
    lr, momentum = np.float32(sgd.lr), np.float32(sgd.momentum)
    fused = sgd.profile is Profile.TORCH_FUSED
    if sgd.weight_decay:
        g = _decay_gradient(sgd, g, p)
    direction = g
    if state:
        retained, gain = np.float32(sgd.retained) * state[0], np.float32(sgd.gain)
        m = fma(gain, g, retained) if fused else retained + gain * g
        state, direction = (m,), m
        if sgd.nesterov:
            direction = fma(m, momentum, g) if fused else g + momentum * m
    return (fma(direction, -lr, p) if fused else p - lr * direction), *state


@_step.register
def _adagrad(adagrad: AdagradStep, g: F32, p: F32, v: F32) -> tuple[F32, ...]:
    size, eps = np.float32(adagrad.step_size), np.float32(adagrad.eps)
    if adagrad.weight_decay:
        g = _decay_gradient(adagrad, g, p)
    fused = adagrad.profile is Profile.TORCH_FUSED
    v = fma(g, g, v) if fused else v + g * g
    denominator: F32 = square_root(v) + eps
    return p - (size * g) / denominator if fused else p - size * (g / denominator), v


@_step.register
def _lion(lion: LionStep, g: F32, p: F32, m: F32) -> tuple[F32, ...]:
    if lion.weight_decay:
        p = p * np.float32(lion.decay)
    sign: F32 = np.sign(np.float32(lion.beta1) * m + np.float32(lion.one_minus_beta1) * g)  # +0 of either zero
    return p - np.float32(lion.lr) * sign, np.float32(lion.beta2) * m + np.float32(lion.one_minus_beta2) * g


def _decay_parameter(adam: AdamStep, p: F32) -> F32:
    decay = np.float32(adam.decay)
    return fma(p, decay, p) if adam.profile is Profile.DEEPSPEED else p * decay


def _decay_gradient(rule: AdamStep | SgdStep | AdagradStep, g: F32, p: F32) -> F32:
    decay = np.float32(rule.decay)
    return g + decay * p if rule.profile is Profile.IEEE else fma(p, decay, g)


def _ieee(adam: AdamStep, g: F32, p: F32, m: F32, v: F32) -> tuple[F32, F32, F32]:
    m = np.float32(adam.beta1) * m + np.float32(adam.one_minus_beta1) * g
    v = np.float32(adam.beta2) * v + (np.float32(adam.one_minus_beta2) * g) * g
    return p - np.float32(adam.step_size) * (m / _denominator(adam, v)), m, v


def _torch_fused(adam: AdamStep, g: F32, p: F32, m: F32, v: F32) -> tuple[F32, F32, F32]:
    m = fma(np.float32(adam.one_minus_beta1), g - m, m)
    v = fma(np.float32(adam.one_minus_beta2) * g, g, np.float32(adam.beta2) * v)
    return p - (np.float32(adam.step_size) * m) / _denominator(adam, v), m, v


def _step_as_deepspeed(adam: AdamStep, g: F32, p: F32, m: F32, v: F32) -> tuple[F32, F32, F32]:
    m = fma(g, np.float32(adam.one_minus_beta1), np.float32(adam.beta1) * m)
    v = fma(g * g, np.float32(adam.one_minus_beta2), np.float32(adam.beta2) * v)
    denominator = fma(square_root(v), np.float32(adam.inverse_bias_correction2_sqrt), np.float32(adam.eps))
    return fma(m / denominator, np.float32(-adam.step_size), p), m, v


def _denominator(adam: AdamStep, v: F32) -> F32:
    root: F32 = square_root(v)
    return root / np.float32(adam.bias_correction2_sqrt) + np.float32(adam.eps)


def _one_nan(x: F32) -> F32:
    return np.where(np.isnan(x), np.uint32(FP32.canonical_nan).view(np.float32), x)
