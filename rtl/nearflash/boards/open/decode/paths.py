"""Static timing: how late, and how early, each net arrives where a clock checks it.

    setup: launch clock, most + path, most + setup  <=  period + capture clock, least + common
    hold:  launch clock, least + path, least + common  >=  capture clock, most + hold

`common` is the difference of least and most on the part of the tree that both clocks share, as that is one clock.
Arrivals are kept by the region of the clock that launched them: a path that crosses regions pays for the skew
between them. One clock, rising edges; times in ps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nearflash.abi.errors import FormatError

__all__ = ["Check", "Clock", "Delay", "EarlyPath", "TimingGraph", "TimingResult", "analyse"]

_PS_PER_S = 10**12


class Delay(NamedTuple):
    """The least and the most that a signal takes, ps."""

    least: int
    most: int

    def after(self, other: "Delay") -> "Delay":
        """This delay behind another one."""
        return Delay(self.least + other.least, self.most + other.most)


@dataclass(frozen=True)
class Clock:
    """A clock at a cell: the time from the tree's root, and how much of it all cells of its region share."""

    region: str
    arrival: Delay
    shared: Delay


@dataclass(frozen=True)
class Check:
    """A cell's input that must not change around its clock's edge."""

    name: str
    net: str
    clock: Clock
    setup: int
    hold: int


@dataclass
class TimingGraph:
    """Nets with delays between them."""

    arcs: dict[str, list[tuple[str, Delay]]] = field(default_factory=dict)
    """Into a net: from which ones, and how long it takes."""
    launches: dict[str, tuple[Clock, Delay]] = field(default_factory=dict)
    """Nets that change behind a clock, and by how much."""
    checks: list[Check] = field(default_factory=list)


class EarlyPath(NamedTuple):
    """A path that is too short for the hold time at its end."""

    slack_ps: int
    """Less than 0."""
    nets: tuple[str, ...]
    """From its launch on."""


@dataclass(frozen=True)
class TimingResult:
    """Results of a pass over a netlist; nets that no clock launches are left out."""

    periods_ps: tuple[int, ...]
    """The shortest period of each endpoint's setup, longest first."""
    hold_slacks_ps: tuple[int, ...]
    """Of each endpoint's hold, which no clock changes, least first."""
    critical_path: tuple[str, ...]
    """Nets with their arrival behind the clock tree's root, and the check at the end with its period."""
    early_paths: tuple[EarlyPath, ...] = ()
    """The earliest path to each endpoint whose hold check fails, worst first."""

    @property
    def fmax_hz(self) -> int:
        """Highest clock at which all setup checks hold; 0 where nothing is checked."""
        return _PS_PER_S // max(self.periods_ps[0], 1) if self.periods_ps else 0

    @property
    def hold_violations(self) -> int:
        """Endpoints whose hold check fails."""
        return sum(slack < 0 for slack in self.hold_slacks_ps)

    def count_late(self, clock_hz: int) -> int:
        """Endpoints whose setup check fails at a clock."""
        return sum(period * clock_hz > _PS_PER_S for period in self.periods_ps)


_Arrivals = dict[str, dict[str, Delay]]


def analyse(graph: TimingGraph, region_skew_ps: int = 0) -> TimingResult:
    """Check every endpoint of a netlist. Raises FormatError for a loop.

    region_skew_ps: between two regions' clocks, beside what the clocks' arrivals state.
    """
    arrivals = _find_arrivals(graph)
    periods: dict[str, tuple[int, str, str]] = {}  # by check: its period, net and region of the launching clock
    slacks: dict[str, tuple[int, str, str]] = {}  # the same of its hold
    for check in graph.checks:
        for region, arrival in arrivals[check.net].items():
            least, most = check.clock.arrival
            shared = check.clock.shared
            common = shared.most - shared.least if region == check.clock.region else -region_skew_ps
            found = arrival.most + check.setup - least - common, check.net, region
            periods[check.name] = max(found, periods.get(check.name, found))
            slack = arrival.least + common - most - check.hold, check.net, region
            slacks[check.name] = min(slack, slacks.get(check.name, slack))
    path: tuple[str, ...] = ()
    if periods:
        (period, net, region), name = max((found, name) for name, found in periods.items())
        ways = [(each, arrivals[each][region].most) for each in _trace(graph, arrivals, net, region)]
        path = tuple(f"{ps / 1000:.2f} ns {each}" for each, ps in [*ways, (name, period)])
    early = tuple(EarlyPath(slack, tuple(_trace(graph, arrivals, net, region, latest=False)))
                  for slack, net, region in sorted(slacks.values()) if slack < 0)  # fmt: skip
    return TimingResult(
        tuple(sorted((found[0] for found in periods.values()), reverse=True)),
        tuple(sorted(found[0] for found in slacks.values())), path, early,
    )  # fmt: skip


def _find_arrivals(graph: TimingGraph) -> _Arrivals:
    """When each net that a check needs arrives, by the region of the clock that launched it."""
    arrivals: _Arrivals = {}
    for net in _order(graph):
        found: dict[str, Delay] = {}
        if net in graph.launches:
            clock, delay = graph.launches[net]
            found[clock.region] = delay.after(clock.arrival)
        for source, delay in graph.arcs.get(net, ()):
            for region, before in arrivals[source].items():
                least, most = delay.after(before)
                other = found.get(region, Delay(least, most))
                found[region] = Delay(min(least, other.least), max(most, other.most))
        arrivals[net] = found
    return arrivals


def _order(graph: TimingGraph) -> Iterator[str]:
    """Nets behind those that they come from. Raises FormatError for a loop."""
    done: set[str] = set()
    entered: set[str] = set()
    waiting = [check.net for check in graph.checks]
    while waiting:
        net = waiting[-1]
        missing = [source for source, _ in graph.arcs.get(net, ()) if source not in done] if net not in done else []
        if missing and net in entered:
            raise FormatError(f"a netlist must have no loop without a register, as at {net}")
        if missing:
            entered.add(net)
            waiting += missing
            continue
        waiting.pop()
        if net not in done:
            done.add(net)
            yield net


def _trace(graph: TimingGraph, arrivals: _Arrivals, net: str, region: str, *, latest: bool = True) -> list[str]:
    """The nets of the latest, or the earliest, path to a net, from its launch on."""
    path = [net]
    while True:
        arrival = arrivals[net][region][latest]
        before = [
            source for source, delay in graph.arcs.get(net, ())
            if region in arrivals[source] and arrivals[source][region][latest] + delay[latest] == arrival
        ]  # fmt: skip
        if not before:
            return path[::-1]
        net = before[0]
        path.append(net)
