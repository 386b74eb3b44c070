"""Times of a step that were not work: what its stages waited for."""

from dataclasses import dataclass, field

__all__ = ["Stalls"]


@dataclass(frozen=True)
class Stalls:
    """Means over a stage's threads and over the devices, of the last step, in seconds.

    `gradients`: until all are checked and their norm is known, and for those that backward has not given yet; `read`:
    the update stage had no extent read; `update`: the write stage had none updated; `write`: the read stage had no
    free slot, as all held extents on their way to flash.
    """

    step_s: float = 0.0
    """From the first extent asked for to the last one written."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def fractions(self) -> dict[str, float]:
        """The same, as fractions of the step."""
        return {name: seconds / self.step_s for name, seconds in self.seconds.items()} if self.step_s else {}
