"""What a generation cost: seconds by phase, bytes by link, memory by tier, and when what ran."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nearflash.abi.errors import CommandError
from nearflash.support.timeline import Timeline

__all__ = ["TIERS", "Budgets", "Ledger", "Report"]

TIERS = ("gpu", "host", "disk")
"""Where bytes lie; gpu is the memory of what computes, also where that is a CPU."""
COMPUTE, WEIGHTS_WAIT, CACHE_WAIT, STATES_WAIT = "compute", "wait for weights", "wait for cache", "wait for activations"


@dataclass(frozen=True)
class Budgets:
    """Bytes that a generation may take of each tier; None: what there is."""

    gpu: int | None = None
    host: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class Report:
    """What one call of `generate` cost."""

    new_tokens: int
    """Of all prompts, up to their stop tokens."""
    total_s: float
    """Everything but loading the model."""
    prefill_s: float
    """Of all blocks, until the first token of each prompt."""
    decode_s: float
    """Of all blocks, from then on."""
    seconds: dict[str, float]
    """By phase: compute, and what computing waited for."""
    link_bytes: dict[str, int]
    """By what and link: `weights disk to host`, `cache host to disk`, …"""
    peak_bytes: dict[str, int]
    """By tier: buffers of weights, KV cache and activations, at most at a time."""
    peak_process_bytes: int
    """Of the process's memory since its program began."""
    weights_s: float = 0.0
    """Of loading what stays in memory, before the first block."""
    expert_hits: int = 0
    """Routed experts, each once for a layer and batch, that were in memory."""
    experts_ahead: int = 0
    """That were read, or being read, because the router was asked with the hidden states of the layer before."""
    expert_misses: int = 0
    """That were neither."""

    @property
    def tokens_per_s(self) -> float:
        """New tokens by all of the time."""
        return self.new_tokens / max(self.total_s, 1e-9)

    @property
    def expert_hit_rate(self) -> float:
        """Routed experts that were in memory, of all that were asked for."""
        return self.expert_hits / max(self.expert_hits + self.experts_ahead + self.expert_misses, 1)


@dataclass
class Ledger:
    """Counts bytes and seconds while a generation runs; any thread may report to it."""

    budgets: Budgets = field(default_factory=Budgets)
    timeline: Timeline = field(default_factory=Timeline)
    links: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def moved(self, what: str, size_bytes: int) -> None:
        """So many bytes went over a link, `weights disk to host` for example."""
        with self._lock:
            self.links[what] = self.links.get(what, 0) + size_bytes

    def take(self, tier: str, size_bytes: int, what: str) -> None:
        """So many bytes of a tier are in use from here on. Raises CommandError beyond its budget."""
        with self._lock:
            held, most = self.held.get(tier, 0) + size_bytes, getattr(self.budgets, tier)
            if most is not None and held > most:
                raise CommandError(
                    f"the budget of {tier} must be {held} bytes at least with {what}, not {most}: give it more, or "
                    "place more on another tier"
                )
            self.held[tier] = held
            self.peaks[tier] = max(self.peaks.get(tier, 0), held)

    def give(self, tier: str, size_bytes: int) -> None:
        """So many bytes of a tier are free again."""
        with self._lock:
            self.held[tier] = self.held.get(tier, 0) - size_bytes

    @contextmanager
    def span(self, name: str, **details: int | float | str) -> Iterator[None]:
        """Note in the timeline how long the block takes."""
        with self.timeline.span(name, **details):
            yield

    def clear(self) -> None:
        """Forget bytes moved and seconds, not what is held."""
        with self._lock:
            self.links, self.peaks = {}, dict(self.held)
            self.timeline.seconds = {}
