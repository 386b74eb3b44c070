"""Stall patterns, the timeout error and its text: what the stream harnesses share."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nearflash.abi.errors import NearflashError, WaitTimeoutError

__all__ = ["STALLS", "SimulationTimeout", "Stall", "StallPattern", "UnexpectedItems", "find_stalls", "waiting_text"]


class SimulationTimeout(WaitTimeoutError):
    """The simulation came to no end; the text names every stream that waits and how far each has come."""


class UnexpectedItems(NearflashError):
    """An output gave more items than the caller stated."""


@dataclass(frozen=True)
class Stall:
    """How one side of a stream holds back: `percent` of the cycles, in runs of `burst_cycles` on average.

    With bursts of 1 cycle each cycle is random by itself. 100 percent never moves an item.
    """

    percent: int = 0
    burst_cycles: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.percent <= 100:
            raise ValueError(f"percent must be within [0, 100], not {self.percent!r}")
        if self.burst_cycles < 1:
            raise ValueError(f"burst_cycles must be at least 1, not {self.burst_cycles!r}")

    @property
    def chances(self) -> tuple[float, float]:
        """Probability of a stall after a cycle that ran, and after one that stalled."""
        share = self.percent / 100
        if self.burst_cycles == 1 or share in (0, 1):
            return share, share
        leave = 1 / self.burst_cycles
        return min(1.0, leave * share / (1 - share)), 1 - leave

    def cycles(self, rng: random.Random) -> Iterator[bool]:
        """For each cycle whether it stalls, without end."""
        after_run, after_stall = self.chances
        stalled = False
        while True:
            stalled = rng.random() < (after_stall if stalled else after_run)
            yield stalled


@dataclass(frozen=True)
class StallPattern:
    """The pattern of all sources (inputs of the component) and of all sinks (its outputs), but for those in `named`."""

    source: Stall = Stall()
    sink: Stall = Stall()
    named: Mapping[str, Stall] = field(default_factory=dict)
    """By stream."""

    def of(self, stream: str, *, is_source: bool) -> Stall:
        """How this stream holds back."""
        return self.named.get(stream, self.source if is_source else self.sink)


_HALF, _BURSTY = Stall(50), Stall(50, burst_cycles=8)

#: The patterns that every stream component is tested under.
STALLS: dict[str, StallPattern] = {
    "none": StallPattern(),
    "source": StallPattern(source=_HALF),
    "sink": StallPattern(sink=_HALF),
    "both": StallPattern(_HALF, _HALF),
    "bursty": StallPattern(_BURSTY, _BURSTY),
}


def find_stalls(stalls: str | StallPattern) -> StallPattern:
    """A pattern by its name in STALLS, or the pattern itself. Raises ValueError for an unknown name."""
    if isinstance(stalls, StallPattern):
        return stalls
    if stalls not in STALLS:
        raise ValueError(f"stalls must be one of {', '.join(STALLS)}, not {stalls!r}")
    return STALLS[stalls]


def waiting_text(cycles: int, sources: Sequence[tuple[str, int, int]], sinks: Sequence[tuple[str, int, int]]) -> str:
    """The text of a SimulationTimeout after `cycles`; each stream is (name, items moved, items expected)."""
    waits = [f"{name} waits for data: {moved} of {count} received" for name, moved, count in sinks if moved < count]
    waits += [f"{name} waits for ready: {moved} of {count} sent" for name, moved, count in sources if moved < count]
    return f"no end after {cycles} cycles: {'; '.join(waits)}"
