"""Outcome of a workload on a system: seconds by phase, energy, bytes held and bytes moved."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """One system on one workload, for one step (a decode step of a batch, a training step, a pass).

    phases: seconds that each phase adds to the step; what another phase hides counts 0 here and stands in `hidden`.
    energy_j: joules by cause. memory_bytes, capacity_bytes: bytes held by tier, and what the tier has. traffic_bytes:
    bytes over each link. units: what a step produces (tokens, steps). assumptions: what the model takes for granted.
    parts: what is bought, names of hardware/component.toml by count; flash_bytes, dram_bytes: beside them, by the GB;
    of flash that computes, as many bytes as cost the same without.
    """

    system: str
    model: str
    phases: Mapping[str, float]
    units: float = 1.0
    hidden: Mapping[str, float] = field(default_factory=dict)
    energy_j: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    capacity_bytes: Mapping[str, float] = field(default_factory=dict)
    traffic_bytes: Mapping[str, float] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    flash_bytes: float = 0.0
    dram_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.phases.values())

    @property
    def rate(self) -> float:
        """Units a second."""
        return self.units / self.seconds

    @property
    def joules(self) -> float:
        """Energy of the step."""
        return sum(self.energy_j.values())

    @property
    def fits(self) -> bool:
        """Whether every tier has room for what it holds."""
        return all(held <= self.capacity_bytes.get(tier, float("inf")) for tier, held in self.memory_bytes.items())

    def share(self, *phases: str) -> float:
        """Share of the named phases in the step's seconds."""
        return sum(self.phases.get(name, 0.0) for name in phases) / self.seconds
