"""Detours for signals that change before the hold time behind the clock's edge is over; nextpnr checks no hold times.

The last input pin of a site on a path that is too short gets a longer route: over wires that nothing uses, from a node
of its present route, by the shortest way among those that are long enough. The parts of the old route that no other
pin needs are taken away.
"""

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from nearflash.boards.open.decode.fabric import SitePin
from nearflash.boards.open.decode.paths import TimingResult
from nearflash.boards.open.decode.routes import Node, Pip, PipFabric, Routes
from nearflash.boards.open.decode.timing import PinNetlist
from nearflash.boards.open.fasm import Feature

__all__ = ["MARGIN_PS", "Detours", "Edits", "lengthen"]

MARGIN_PS = 20
"""Slack of an endpoint behind its detour, at least."""
_REACHES_PS = (100, 300, 600, 1_200)
"""Delays beyond what is needed that are searched, one after the other."""


class Edits(NamedTuple):
    """Pips to turn off and on."""

    removed: frozenset[Feature]
    added: frozenset[Feature]


def lengthen(netlist: PinNetlist, timing: TimingResult) -> Edits:
    """Detours for the paths of a netlist that are too short; a path for which there is none keeps its route.

    timing: of the netlist, whose fabric is changed.
    """
    detours = Detours(netlist.fabric, netlist.pins)
    needed: dict[str, int] = {}
    for path in timing.early_paths:
        pins = [net for net in path.nets if "@" in net]
        if pins:
            needed[pins[-1]] = max(needed.get(pins[-1], 0), MARGIN_PS - path.slack_ps)
    for pin, ps in needed.items():
        detours.lengthen(pin, ps)
    return detours.edits


class _Reach(NamedTuple):
    """A node that a search came to: its delay, and the pips and nodes since where the search began."""

    ps: int
    pips: tuple[Pip, ...]
    nodes: frozenset[Node]


class Detours:
    """Detours in a fabric, which they change. pins: the pins of sites by name, each with the pin that drives it."""

    def __init__(self, fabric: PipFabric, pins: Mapping[str, tuple[SitePin, SitePin]]) -> None:
        self._fabric, self._pins, self._routes = fabric, pins, Routes(fabric)
        self._removed: set[Pip] = set()
        self._added: set[Pip] = set()

    @property
    def edits(self) -> Edits:
        """The pips that were turned off and on so far."""
        removed, added = self._removed - self._added, self._added - self._removed
        return Edits(frozenset(map(_feature, removed)), frozenset(map(_feature, added)))

    def lengthen(self, name: str, ps: int) -> bool:
        """Make the least delay of a pin's route longer by `ps` or more; whether there is a way."""
        pin, _ = self._pins[name]
        route = list(self._list_route((pin.tile, self._fabric.sites(pin.tile)[pin.site]["site_pins"][pin.pin]["wire"])))
        while route and (route[0][1] is None or not self._fabric.is_switch(route[0][1])):
            route.pop(0)
        way = self._find(route, ps) if route else None
        if way is None:
            return False
        self._remove_end(route, {self._fabric.find_node((tile, origin)) for tile, origin, _ in way})
        for pip in way:
            self._fabric.turn_on(pip)
            self._added.add(pip)
        return True

    def _remove_end(self, route: list[tuple[Node, Pip | None]], kept: set[Node]) -> None:
        """Turn off the pip into the end of a route, and those before it that no other pin needs."""
        for node, pip in route:
            if pip is None or (node != route[0][0] and (node in kept or self._fabric.is_read(node))):
                return
            self._fabric.turn_off(pip)
            self._removed.add(pip)

    def _list_route(self, wire: tuple[str, str]) -> Iterator[tuple[Node, Pip | None]]:
        """Nodes from a pin back to the one that a site drives, each with the pip that drives it."""
        while True:
            node, pip = self._fabric.step(wire)
            yield tuple(node), pip
            if pip is None:
                return
            wire = pip[0], pip[1]

    def _find(self, route: list[tuple[Node, Pip | None]], ps: int) -> tuple[Pip, ...] | None:
        """The pips of the least of the ways that are long enough.

        A way goes from a node of the route to one that nothing uses, which two searches came to, and on to the end.
        """
        arrivals = self._list_arrivals(route)
        end = route[0][0]
        ends = {end: _Reach(0, (), frozenset())}
        least = arrivals[end] + ps
        starts = {node: _Reach(arrivals[node], (), frozenset()) for node, _ in route[1:]}
        for reach in _REACHES_PS:
            out = self._search(starts, least + reach, self._list_following)
            back = self._search(ends, least + reach - min(arrivals.values()), self._list_preceding)
            ways = [(total, node) for node in out.keys() & back.keys() - arrivals.keys()
                    if (total := out[node].ps + back[node].ps) >= least]  # fmt: skip
            for _, node in sorted(ways):
                if out[node].nodes & back[node].nodes == {node}:
                    return *out[node].pips, *back[node].pips[::-1]
        return None

    def _list_arrivals(self, route: list[tuple[Node, Pip | None]]) -> dict[Node, int]:
        """Least delay of each node of a route behind the pin that drives it."""
        arrivals, ps = {}, 0
        for node, pip in reversed(route):
            ps += self._routes.find_step(node, pip).least if pip else 0
            arrivals[node] = ps
        return arrivals

    def _search(
        self, starts: Mapping[Node, _Reach], limit: int, list_next: Callable[[Node], Iterator[tuple[Node, int, Pip]]]
    ) -> dict[Node, _Reach]:
        """Nodes that nothing uses within a delay, by their shortest ways."""
        found: dict[Node, _Reach] = {}
        waiting = sorted((reach.ps, node, reach) for node, reach in starts.items())
        while waiting:
            ps, node, reach = heappop(waiting)
            if node in found:
                continue
            found[node] = reach
            for other, delay, pip in list_next(node):
                if other not in found and ps + delay <= limit and self._fabric.is_free(other):
                    step = _Reach(ps + delay, (*reach.pips, pip), reach.nodes | {other})
                    heappush(waiting, (step.ps, other, step))
        return found

    def _list_following(self, node: Node) -> Iterator[tuple[Node, int, Pip]]:
        for pip in self._fabric.list_switches(node):
            other = self._fabric.find_node((pip[0], pip[2]))
            yield other, self._routes.find_step(other, pip).least, pip

    def _list_preceding(self, node: Node) -> Iterator[tuple[Node, int, Pip]]:
        for pip in self._fabric.list_switches(node, into=True):
            yield self._fabric.find_node((pip[0], pip[1])), self._routes.find_step(node, pip).least, pip


def _feature(pip: Pip) -> Feature:
    tile, origin, to = pip
    return Feature(tile, f"{to}.{origin}")
