"""One AdaGrad step as scalars.

Source: Duchi, Hazan & Singer 2011; torch.optim.Adagrad.
"""

from dataclasses import dataclass
from typing import ClassVar

from nearflash.abi.formats import fp32_round
from nearflash.abi.optimizers.base import OptimizerStep, Profile, non_negative
from nearflash.abi.optimizers.state import StateFormat

__all__ = ["AdagradStep"]


@dataclass(frozen=True)
class AdagradStep(OptimizerStep):
    """Hyper-parameters of step `step` (counted from 1). Raises CommandError for a value outside its range."""

    optimizer: ClassVar[str] = "adagrad"
    PROFILES: ClassVar[tuple[Profile, ...]] = (Profile.IEEE, Profile.TORCH_FUSED)

    lr: float
    step: int
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    """Added to the gradient, times the parameter (L2)."""
    profile: Profile = Profile.IEEE
    state_format: StateFormat = StateFormat.FP32

    def __post_init__(self) -> None:
        self._check(
            {"lr_decay": non_negative(self.lr_decay), "eps": non_negative(self.eps)}, ("eps", "step_size", "decay")
        )

    @property
    def torch_names(self) -> dict[str, str]:
        """State arrays by role, with torch's names."""
        return {"v": "sum"}

    @property
    def step_size(self) -> float:
        """lr / (1 + (step - 1)·lr_decay) (fp32)."""
        return fp32_round(self.lr / (1 + (self.step - 1) * self.lr_decay))

    @property
    def decay(self) -> float:
        """weight_decay (fp32)."""
        return fp32_round(self.weight_decay)
