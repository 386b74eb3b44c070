"""One Lion step as scalars.

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
"""

from dataclasses import dataclass
from typing import ClassVar

from nearflash.abi.formats import fp32_round
from nearflash.abi.optimizers.base import Profile, TwoBetas, unit_interval
from nearflash.abi.optimizers.state import StateFormat

__all__ = ["LionStep"]


@dataclass(frozen=True)
class LionStep(TwoBetas):
    """Hyper-parameters of step `step` (counted from 1). Raises CommandError for a value outside its range."""

    optimizer: ClassVar[str] = "lion"

    lr: float
    step: int
    beta1: float = 0.9
    """Weight of m in the direction."""
    beta2: float = 0.99
    """Weight of m in the new m."""
    weight_decay: float = 0.0
    """Decoupled, as AdamW's."""
    profile: Profile = Profile.IEEE
    state_format: StateFormat = StateFormat.FP32

    def __post_init__(self) -> None:
        self._check(
            {"beta1": unit_interval(self.beta1), "beta2": unit_interval(self.beta2)},
            ("beta1", "beta2", "one_minus_beta1", "one_minus_beta2", "decay"),
        )

    @property
    def torch_names(self) -> dict[str, str]:
        """State arrays by role, with the name that torch optimizers of Lion use."""
        return {"m": "exp_avg"}

    @property
    def decay(self) -> float:
        """Factor of the parameter, 1 - lr·wd (fp32)."""
        return fp32_round(1 - self.lr * self.weight_decay)
