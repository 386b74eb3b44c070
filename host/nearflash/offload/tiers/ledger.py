"""Counts of a generation as it runs: seconds by phase, bytes by link, memory by tier with its budgets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nearflash.abi.errors import CommandError
from nearflash.support.timeline import Timeline

__all__ = ["TIERS", "Budgets", "Ledger"]

TIERS = ("gpu", "host", "disk")
"""Where bytes lie; gpu is the memory of what computes, also where that is a CPU."""
COMPUTE, BETWEEN_LAYERS, RANKS_WAIT = "compute", "between layers", "wait for ranks"
WEIGHTS_WAIT, CACHE_WAIT, STATES_WAIT = "wait for weights", "wait for cache", "wait for activations"
EXPERTS_WAIT = "wait for experts"
PHASES = (COMPUTE, WEIGHTS_WAIT, CACHE_WAIT, STATES_WAIT, EXPERTS_WAIT, BETWEEN_LAYERS)
"""Names of the spans that a run's time is made of."""


@dataclass(frozen=True)
class Budgets:
    """Bytes that a generation may take of each tier; None: what there is."""

    gpu: int | None = None
    host: int | None = None
    disk: int | None = None


@dataclass
class Ledger:
    """Counts bytes and seconds while a generation runs; any thread may report to it."""

    budgets: Budgets = field(default_factory=Budgets)
    timeline: Timeline = field(default_factory=Timeline)
    links: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_bytes(self, link: str, size_bytes: int) -> None:
        """So many bytes went over a link, `weights disk to host` for example."""
        with self._lock:
            self.links[link] = self.links.get(link, 0) + size_bytes

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
