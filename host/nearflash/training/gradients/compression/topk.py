"""Top-K: which share of the gradients a step keeps, and how."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nearflash.abi.errors import FormatError, ShapeError
from nearflash.abi.topk import ValueFormat

__all__ = ["WARMUP_STEPS", "TopK"]

WARMUP_STEPS = 100


@dataclass(frozen=True)
class TopK:
    """Keep the largest gradients of each range of parameters. Raises ShapeError, FormatError.

    ratio: share kept, in (0, 1], or a function of the step (from 1) that gives it.
    feedback: what is not kept is added to the next step's gradients; without it, it is lost.
    value_format: of the values on the wire. fp16 ends at 6e-8 below: gradients without a loss scale often lie there.
    residual: how what is not kept is held between steps: "int4" (5/8 byte a parameter of host or GPU memory; 16
    parameters share a scale, and rounding loses up to 1/14 of the largest one's magnitude), or "fp32" (4 bytes, exact).
    saved: what is not kept is a part of the state, so that training resumes bit by bit, and each step's crosses the
    link; else it stays where gradients come from, and is zero again after a resume, a restore or a rollback.
    warmup_steps: steps in which the share falls from 1 to `ratio` exponentially, since what is left out in the first
    steps, when weights and moments change most, is missed most. None: WARMUP_STEPS, which send as much as 21 steps
    without compression at 1 %, or 0 where `ratio` is a function.

    Source: Lin et al., Deep Gradient Compression (ICLR'18), warm-up; MicroAdam (NeurIPS'24), the residual in 4 bits.
    """

    ratio: float | Callable[[int], float] = 0.01
    feedback: bool = True
    value_format: Literal["fp16", "bf16", "fp32"] = "bf16"
    residual: Literal["fp32", "int4"] = "int4"
    saved: bool = True
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        if self.value_format not in ("fp16", "bf16", "fp32"):
            raise FormatError(f"value_format must be 'fp16', 'bf16' or 'fp32', not {self.value_format!r}")
        if self.residual not in ("fp32", "int4"):
            raise FormatError(f"residual must be 'fp32' or 'int4', not {self.residual!r}")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ShapeError(f"warmup_steps must be at least 0, not {self.warmup_steps!r}")
        self.ratio_at(1)

    @property
    def wire_format(self) -> ValueFormat:
        """The value format as the stream's header has it."""
        return ValueFormat[self.value_format.upper()]

    def ratio_at(self, step: int) -> float:
        """Share kept at `step`, counted from 1. Raises ShapeError where it is not in (0, 1]."""
        ratio = self.ratio(step) if callable(self.ratio) else self.ratio
        if not 0 < ratio <= 1:
            raise ShapeError(f"ratio must be in (0, 1], not {ratio!r} at step {step}")
        usual = 0 if callable(self.ratio) else WARMUP_STEPS
        steps = usual if self.warmup_steps is None else self.warmup_steps
        return ratio ** min(1.0, step / (steps + 1))

    def count(self, params: int, step: int) -> int:
        """Pairs kept of `params` parameters at `step`, at least 1."""
        return min(params, max(1, round(self.ratio_at(step) * params)))
