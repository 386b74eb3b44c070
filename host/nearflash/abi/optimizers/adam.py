"""One Adam or AdamW step as scalars. 1 - beta is computed in double, not in fp32.

Source: Kingma & Ba 2015 (Adam), Loshchilov & Hutter 2019 (AdamW), torch's fused CPU kernel, DeepSpeed's CPU Adam.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from nearflash.abi.formats import fp32_round
from nearflash.abi.optimizers.base import Profile, TwoBetas, non_negative, unit_interval
from nearflash.abi.optimizers.state import StateFormat

__all__ = ["AdamStep"]


@dataclass(frozen=True)
class AdamStep(TwoBetas):
    """Hyper-parameters of step `step` (counted from 1). Raises CommandError for a value outside its range."""

    optimizer: ClassVar[str] = "adam"
    PROFILES: ClassVar[tuple[Profile, ...]] = tuple(Profile)

    lr: float
    step: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """True: AdamW (decay acts on the parameter). False: Adam (L2: decay is added to the gradient)."""
    profile: Profile = Profile.IEEE
    state_format: StateFormat = StateFormat.FP32

    def __post_init__(self) -> None:
        self._check(
            {"beta1": unit_interval(self.beta1), "beta2": unit_interval(self.beta2), "eps": non_negative(self.eps)},
            ("beta1", "beta2", "eps", "one_minus_beta1", "one_minus_beta2", "step_size", "decay"),
        )
        # torch's lerp rounds in another order from a weight of 0.5 up, and the lane has no such path.
        lerp = self.profile is not Profile.TORCH_FUSED or self.one_minus_beta1 < 0.5
        self._require(lerp, "beta1", "over 0.5 in profile torch_fused (or use profile ieee)", self.beta1)

    @property
    def torch_names(self) -> dict[str, str]:
        """State arrays by role, with torch's names."""
        return {"m": "exp_avg", "v": "exp_avg_sq"}

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
