"""Base of all rules: profile, state format, the arrays beside the parameters, and the checks of their scalars.

Scalars are computed in double precision, as torch does, and rounded once to fp32 (docs/contracts/numerics.md has the
formulas).
"""

import math
from abc import ABC
from typing import Any, ClassVar

from nearflash.abi.errors import CommandError
from nearflash.abi.formats import FP32_MIN_NORMAL, fp32_round
from nearflash.abi.optimizers.state import StateFormat
from nearflash.abi.python310 import StrEnum

__all__ = ["OptimizerStep", "Profile", "TwoBetas", "non_negative", "unit_interval"]


class Profile(StrEnum):
    """Operation order of the update. Results are equal to the bit on every backend under one profile."""

    IEEE = "ieee"
    """Every operation rounded, no fused multiply-add."""
    TORCH_FUSED = "torch_fused"
    """torch.optim's fused kernels on CPU."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed's vectorised CPU Adam."""


class OptimizerStep(ABC):
    """One optimizer step as scalars; frozen, and equal to another of the same scalars.

    Every rule has the fields `lr`, `step` (of the tensor, from 1), `weight_decay`, `profile` and `state_format`.
    Construction raises CommandError for a value outside its range.
    """

    optimizer: ClassVar[str]
    """Name of the rule: adam, sgd, adagrad, lion."""
    PROFILES: ClassVar[tuple[Profile, ...]] = (Profile.IEEE,)
    """Operation orders that are defined for the rule."""

    lr: float
    step: int
    weight_decay: float
    profile: Profile
    state_format: StateFormat

    @property
    def torch_names(self) -> dict[str, str]:
        """State arrays by role ("m", "v"), with torch's name of each."""
        raise NotImplementedError

    @property
    def arrays(self) -> tuple[str, ...]:
        """Arrays beside p, in the order of the streams: the roles, and in state format mx8 the scales of each."""
        scales = self.state_format is StateFormat.MX8
        return tuple(name for role in self.torch_names for name in (role, f"{role}_scale")[: 2 if scales else 1])

    def _check(self, rules: dict[str, tuple[bool, str]], scalars: tuple[str, ...]) -> None:
        """Raise CommandError for the first value outside its range, and for scalars that fp32 cannot hold normally."""
        for name, kind in (("profile", Profile), ("state_format", StateFormat)):
            object.__setattr__(self, name, kind(getattr(self, name)))
        common = {
            "profile": (self.profile in self.PROFILES, f"{' or '.join(self.PROFILES)} for {type(self).__name__}"),
            "lr": (math.isfinite(self.lr) and self.lr >= 0, "finite and at least 0"),
            "step": (self.step >= 1, "at least 1"),
            "weight_decay": (math.isfinite(self.weight_decay) and self.weight_decay >= 0, "finite and at least 0"),
        }
        for name, (holds, rule) in (common | rules).items():
            self._require(holds, name, rule, getattr(self, name))
        for name in ("lr", *scalars):
            value = fp32_round(getattr(self, name))
            self._require(value == 0 or abs(value) >= FP32_MIN_NORMAL, name, "zero or a normal fp32 number", value)

    @staticmethod
    def _require(condition: bool, name: str, rule: str, value: Any) -> None:
        if not condition:
            raise CommandError(
                f"{name} must be {rule}, not {str(value) if isinstance(value, StrEnum) else repr(value)}"
            )


class TwoBetas(OptimizerStep):
    """A step with the fields `beta1` and `beta2`."""

    beta1: float
    beta2: float

    @property
    def one_minus_beta1(self) -> float:
        """1 - beta1 (fp32)."""
        return fp32_round(1 - self.beta1)

    @property
    def one_minus_beta2(self) -> float:
        """1 - beta2 (fp32)."""
        return fp32_round(1 - self.beta2)


def unit_interval(value: float) -> tuple[bool, str]:
    """The check of a beta or a momentum."""
    return 0 <= value < 1, "in [0, 1)"


def non_negative(value: float) -> tuple[bool, str]:
    """The check of an eps or a decay."""
    return math.isfinite(value) and value >= 0, "finite and at least 0"
