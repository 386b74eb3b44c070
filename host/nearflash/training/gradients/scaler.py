"""Loss scaling: keeps fp16 gradients away from underflow, and backs off when they overflow.

Source: Micikevicius et al. 2018, "Mixed precision training"; the hysteresis is that of DeepSpeed's DynamicLossScaler.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from nearflash.abi.errors import CommandError

__all__ = ["LossScale"]


@dataclass(frozen=True)
class LossScale:
    """A scale and what led to it; `after` gives the next one. Raises CommandError for values that make no sense."""

    scale: float = 2.0**16
    """What the loss is multiplied by, at least 1 after an overflow."""
    window: int = 1000
    """Steps without overflow after which the scale rises; 0: it never changes."""
    factor: float = 2.0
    hysteresis: int = 2
    """The scale falls with this overflow since it last rose, and with each after it."""
    good_steps: int = 0
    """Since the last overflow or rise."""
    overflows: int = 0
    """Since the last rise."""

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("loss_scale", 0 < self.scale < float("inf"), "positive and finite"),
            ("window", self.window >= 0, "at least 0"),
            ("factor", self.factor > 1, "over 1"),
            ("hysteresis", self.hysteresis >= 1, "at least 1"),
        ):
            if not holds:
                value = self.scale if name == "loss_scale" else getattr(self, name)
                raise CommandError(f"{name} must be {rule}, not {value!r}")

    @classmethod
    def parse(cls, argument: "LossScale | Literal['dynamic'] | float | None") -> Self | None:
        """Read an optimizer's argument `loss_scale`: a LossScale, "dynamic", a fixed scale, or None."""
        if argument is None or isinstance(argument, cls):
            return argument
        if argument == "dynamic":
            return cls()
        if isinstance(argument, int | float):
            return cls(float(argument), window=0)
        raise CommandError(f"loss_scale must be None, 'dynamic', a number or a LossScale, not {argument!r}")

    def update(self, *, overflow: bool) -> Self:
        """The scale of the step after one that overflowed (and was skipped) or did not."""
        if not self.window:
            return self
        if overflow:
            overflows = self.overflows + 1
            scale = self.scale if overflows < self.hysteresis else max(1.0, self.scale / self.factor)
            return replace(self, scale=scale, good_steps=0, overflows=overflows)
        if self.good_steps + 1 < self.window:
            return replace(self, good_steps=self.good_steps + 1)
        risen = self.scale * self.factor
        return replace(self, scale=risen if risen < float("inf") else self.scale, good_steps=0, overflows=0)

    def to_json(self) -> dict[str, Any]:
        """Save what a resumed run needs, as plain values."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows": self.overflows}

    def resume(self, body: dict[str, Any]) -> Self:
        """This scale's settings at the point that `to_json` noted; a fixed scale stays what it is."""
        return replace(self, **body) if self.window else self
