"""`optimizer.report`: what the steps moved, waited for and found."""

from dataclasses import dataclass, field

from nearflash.support.timeline import Timeline
from nearflash.training.step.stalls import Stalls
from nearflash.training.step.traffic import Traffic

__all__ = ["SPANS", "Report"]

SPANS = 20_000
"""Four steps of a billion parameters: some 5 MB, however large the model is."""


@dataclass
class Report:
    """Figures of an optimizer's steps, since its construction unless stated otherwise. For callers to read only."""

    timeline: Timeline = field(default_factory=lambda: Timeline(SPANS))
    """Which thread did what, and when: the last SPANS of it."""
    traffic: Traffic = field(default_factory=Traffic)
    """Bytes moved."""
    stalls: Stalls = field(default_factory=Stalls)
    """What the last step waited for."""
    grad_norm: float | None = None
    """Global norm of the last step's gradients, unscaled, before clipping."""
    skipped_steps: int = 0
    """Steps without effect, as gradients had overflowed."""
    mispredictions: int = 0
    """Speculative steps that began during backward and were then done again."""

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by part of a step (`norm`, `update`, `flash read`, …), summed over threads."""
        return dict(self.timeline.seconds)
