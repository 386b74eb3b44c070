"""One step of stochastic gradient descent as scalars: momentum, dampening and Nesterov as torch has them.

Source: torch.optim.SGD; Sutskever et al. 2013 (the momentum that torch's differs from: lr multiplies the whole step).
"""

from dataclasses import dataclass
from typing import ClassVar

from nearflash.abi.formats import fp32_round
from nearflash.abi.optimizers.base import OptimizerStep, Profile, unit_interval
from nearflash.abi.optimizers.state import StateFormat

__all__ = ["SgdStep"]


@dataclass(frozen=True)
class SgdStep(OptimizerStep):
    """Hyper-parameters of step `step` (counted from 1). Raises CommandError for a value outside its range."""

    optimizer: ClassVar[str] = "sgd"
    PROFILES: ClassVar[tuple[Profile, ...]] = (Profile.IEEE, Profile.TORCH_FUSED)

    lr: float
    step: int
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    """Added to the gradient, times the parameter (L2)."""
    profile: Profile = Profile.IEEE
    state_format: StateFormat = StateFormat.FP32

    def __post_init__(self) -> None:
        plain = self.momentum > 0 and self.dampening == 0
        self._check(
            {
                "momentum": unit_interval(self.momentum),
                "dampening": (0 <= self.dampening <= 1, "in [0, 1]"),
                "nesterov": (plain or not self.nesterov, "False without momentum or with dampening"),
            },
            ("momentum", "gain", "decay"),
        )

    @property
    def torch_names(self) -> dict[str, str]:
        """State arrays by role, with torch's names; none without momentum."""
        return {"m": "momentum_buffer"} if self.momentum else {}

    @property
    def retained(self) -> float:
        """Factor of m (fp32); -0 at the first step, so that m becomes the gradient itself, a negative zero too."""
        return fp32_round(self.momentum) if self.step > 1 else -0.0

    @property
    def gain(self) -> float:
        """Factor of the gradient in m (fp32): 1 - dampening, and 1 at the first step."""
        return fp32_round(1 - self.dampening) if self.step > 1 else 1.0

    @property
    def decay(self) -> float:
        """weight_decay (fp32)."""
        return fp32_round(self.weight_decay)
