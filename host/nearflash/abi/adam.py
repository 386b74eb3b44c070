"""One Adam or AdamW step as scalars: everything that is the same for all parameters.

The operation order is a named profile (docs/numerics.md has the formulas). Scalars are computed here in double
precision, as torch does, and rounded once to fp32; 1 - beta is computed in double too, not in fp32.

Source: Kingma & Ba 2015 (Adam), Loshchilov & Hutter 2019 (AdamW), torch's fused CPU kernel, DeepSpeed's CPU Adam.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from nearflash.abi.errors import CommandError
from nearflash.abi.formats import FP32_MIN_NORMAL, fp32_round

__all__ = ["AdamStep", "Profile"]


class Profile(StrEnum):
    """Operation order of the update. Results are equal to the bit on every backend under one profile."""

    IEEE = "ieee"
    """Every operation rounded, no fused multiply-add."""
    TORCH_FUSED = "torch_fused"
    """torch.optim.AdamW(fused=True) on CPU."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed's vectorised CPU Adam."""


def _require(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise CommandError(f"{name} must be {rule}, not {value!r}")


@dataclass(frozen=True)
class AdamStep:
    """Hyper-parameters of step `step` (counted from 1). Raises CommandError for a value outside its range."""

    lr: float
    step: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """True: AdamW (decay acts on the parameter). False: Adam (L2: decay is added to the gradient)."""
    profile: Profile = Profile.IEEE

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", Profile(self.profile))
        _require(math.isfinite(self.lr) and self.lr >= 0, "lr", "finite and at least 0", self.lr)
        _require(self.step >= 1, "step", "at least 1", self.step)
        _require(0 <= self.beta1 < 1, "beta1", "in [0, 1)", self.beta1)
        _require(0 <= self.beta2 < 1, "beta2", "in [0, 1)", self.beta2)
        _require(math.isfinite(self.eps) and self.eps >= 0, "eps", "finite and at least 0", self.eps)
        wd = self.weight_decay
        _require(math.isfinite(wd) and wd >= 0, "weight_decay", "finite and at least 0", wd)
        for name in ("lr", "beta1", "beta2", "eps", "one_minus_beta1", "one_minus_beta2", "step_size", "decay"):
            value = fp32_round(getattr(self, name))
            _require(value == 0 or abs(value) >= FP32_MIN_NORMAL, name, "zero or a normal fp32 number", value)
        # torch's lerp rounds in another order from a weight of 0.5 up, and the lane has no such path.
        lerp = self.profile is not Profile.TORCH_FUSED or self.one_minus_beta1 < 0.5
        _require(lerp, "beta1", "over 0.5 in profile torch_fused (or use profile ieee)", self.beta1)

    @property
    def one_minus_beta1(self) -> float:
        """1 - beta1 (fp32)."""
        return fp32_round(1 - self.beta1)

    @property
    def one_minus_beta2(self) -> float:
        """1 - beta2 (fp32)."""
        return fp32_round(1 - self.beta2)

    @property
    def step_size(self) -> float:
        """lr / (1 - beta1^step) (fp32)."""
        return fp32_round(self.lr / (1 - self.beta1**self.step))

    @property
    def bias_correction2_sqrt(self) -> float:
        """sqrt(1 - beta2^step) (fp32): divides the denominator in profiles ieee and torch_fused."""
        return fp32_round(math.sqrt(1 - self.beta2**self.step))

    @property
    def inverse_bias_correction2_sqrt(self) -> float:
        """1 / sqrt(1 - beta2^step) (fp32): multiplies it in profile deepspeed."""
        return fp32_round(1 / math.sqrt(1 - self.beta2**self.step))

    @property
    def decay(self) -> float:
        """Scalar of the decay operation (fp32).

        AdamW: 1 - lr·wd (ieee, torch_fused) or -lr·wd (deepspeed). Adam with L2: wd.
        """
        if not self.decoupled:
            return fp32_round(self.weight_decay)
        if self.profile is Profile.DEEPSPEED:
            return fp32_round(-self.lr * self.weight_decay)
        return fp32_round(1 - self.lr * self.weight_decay)
