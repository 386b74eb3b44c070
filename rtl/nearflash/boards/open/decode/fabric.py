"""Interconnect of a decoded bitstream: what drives a wire, over nodes and through pips, back to a site's pin.

A node is all wires of neighbouring tiles that are one. It is driven by the one pip into it that the bits turn on, else
by a site's output, else by a pip that is always on. Ground and VCC are sources; a few wires of the switch boxes are VCC
where no pip drives them (`default` in prjxray's database). A node with none of these has no driver.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import PartDatabase

__all__ = ["Fabric", "SitePin", "Source"]

Wire = tuple[str, str]
"""Tile and wire."""
_SHARED = ("RAMBFIFO36E1",)
"""Sites whose pins lie on the wires of other sites' pins: the others count."""


class SitePin(NamedTuple):
    """A pin of a site, which is the `site`th of its tile's type."""

    tile: str
    site: int
    pin: str


Source = int | SitePin | None
"""What drives a wire: a constant, a site's pin, or nothing."""


class Fabric:
    """The wires of a part with the pips that features turn on. Raises FormatError where two pips drive one wire."""

    def __init__(self, database: PartDatabase, features: Mapping[str, frozenset[str]]) -> None:
        self.database = database
        #: Features that are no pips, by tile.
        self.configuration: dict[str, set[str]] = {}
        #: Pips on the way to a wire that was traced: what comes in, and the wire that was asked for.
        self.used_pips: dict[Wire, tuple[str, Wire]] = {}
        self._pips: dict[Wire, str] = {}
        self._sources: dict[Wire, Source] = {}
        self._kinds: dict[str, _TileKind] = {}
        self._joined = _join(database.connections())
        for tile, names in features.items():
            self._add(tile, names)

    def replace_tile(self, tile: str, names: frozenset[str]) -> "Fabric":
        """The same wires with other features of one tile. Raises FormatError as the constructor."""
        other = copy(self)
        other.configuration = {name: found for name, found in self.configuration.items() if name != tile}
        other._pips = {wire: origin for wire, origin in self._pips.items() if wire[0] != tile}
        other._sources, other.used_pips = {}, {}
        other._add(tile, names)
        return other

    def _add(self, tile: str, names: frozenset[str]) -> None:
        wires = self.kind(tile).wires
        for name in names:
            to, _, origin = name.partition(".")
            if to not in wires or origin not in wires:
                self.configuration.setdefault(tile, set()).add(name)
            elif self._pips.setdefault((tile, to), origin) != origin:
                raise FormatError(f"one pip must drive {tile}.{to}, not both {origin} and {self._pips[tile, to]}")

    def kind(self, tile: str) -> "_TileKind":
        """The wires, pins and fixed pips of a tile."""
        name = self.database.tiles[tile]["type"]
        if name not in self._kinds:
            self._kinds[name] = _TileKind(self.database, name)
        return self._kinds[name]

    def sites(self, tile: str) -> list[Any]:
        """The sites of a tile, as its type in the database has them."""
        return self.kind(tile).sites

    def drive(self, tile: str, site: int, pin: str) -> Source:
        """The source of a site's pin; None too for a pin without a wire."""
        wire = self.sites(tile)[site]["site_pins"].get(pin)
        return self.trace((tile, wire["wire"])) if wire else None

    def trace(self, wire: Wire) -> Source:
        """The source of a wire. Raises FormatError where several drive it."""
        way: list[list[Wire]] = []
        found, asked = None, wire
        while True:
            if wire in self._sources:
                found = self._sources[wire]
                break
            node = self._node(wire)
            way.append(node)
            step = self._step(node, asked)
            if not isinstance(step, list):
                found = step
                break
            wire = step[0]
        for node in way:
            self._sources.update(dict.fromkeys(node, found))
        return found

    def _step(self, node: list[Wire], asked: Wire) -> Source | list[Wire]:
        """The source of a node, or, in a list, the wire before it."""
        active = [(tile, self._pips[tile, wire]) for tile, wire in node if (tile, wire) in self._pips]
        if len(active) > 1:
            raise FormatError(f"one pip must drive {'.'.join(node[0])}, not {len(active)}")
        if active:
            driven = next(wire for wire in node if wire in self._pips)
            self.used_pips.setdefault(driven, (active[0][1], asked))
            return active
        sources = set(self._list_sources(node))
        if len(sources) > 1:
            raise FormatError(f"one site pin must drive {'.'.join(node[0])}, not {sorted(map(str, sources))}")
        if sources:
            return sources.pop()
        fixed = {self._node((tile, origin))[0]: (tile, origin)
                 for tile, wire in node for origin in self.kind(tile).fixed.get(wire, ())}  # fmt: skip
        if len(fixed) == 1:
            return list(fixed.values())
        driving = {self.trace(wire) for wire in fixed.values()} - {None}
        if len(driving) > 1:
            raise FormatError(f"one source must drive {'.'.join(node[0])}, not {sorted(map(str, driving))}")
        if driving:
            return driving.pop()
        return 1 if any(wire in self.kind(tile).default for tile, wire in node) else None

    def _list_sources(self, node: list[Wire]) -> Iterator[int | SitePin]:
        for tile, wire in node:
            kind = self.kind(tile)
            for site, pin in kind.outputs.get(wire, ()):
                yield int(pin[-1]) if kind.sites[site]["type"] == "TIEOFF" else SitePin(tile, site, pin)
            if wire.endswith(("GND_WIRE", "VCC_WIRE")):
                yield int(wire.endswith("VCC_WIRE"))

    def _node(self, wire: Wire) -> list[Wire]:
        """All wires of a wire's node, in order."""
        tiles, seen, waiting = self.database.tiles, {wire}, [wire]
        while waiting:
            tile, name = waiting.pop()
            here = tiles[tile]
            for x, y, kind, other in self._joined[here["type"]].get(name, ()):
                neighbour = self.database.find_tile(here["grid_x"] + x, here["grid_y"] + y)
                if neighbour and tiles[neighbour]["type"] == kind and (neighbour, other) not in seen:
                    seen.add((neighbour, other))
                    waiting.append((neighbour, other))
        return sorted(seen)


class _TileKind:
    """A type of tile: its wires, its sites' outputs by wire, and what drives wires without bits."""

    def __init__(self, database: PartDatabase, name: str) -> None:
        description = database.tile_type(name)
        self.wires: Mapping[str, Any] = description["wires"]
        self.sites: list[Any] = description["sites"]
        self.outputs: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for index, site in enumerate(self.sites):
            directions = database.pin_directions(site["type"])
            for pin, wire in site["site_pins"].items():
                if wire and directions[pin] == "OUT" and site["type"] not in _SHARED:
                    self.outputs[wire["wire"]].append((index, pin))
        self.fixed: dict[str, list[str]] = defaultdict(list)
        self.default: set[str] = set()
        for feature, kind in database.fixed_wires(name).items():
            to, _, origin = feature.partition(".")
            if kind == "always":
                self.fixed[to].append(origin)
            elif kind == "default":
                self.default.add(to)
        for feature in database.list_clear(name):
            to, _, origin = feature.partition(".")
            if to in self.wires and origin in self.wires:
                self.fixed[to].append(origin)


def _join(connections: Any) -> dict[str, dict[str, list[tuple[int, int, str, str]]]]:
    """Wires beside each kind's wires: distance, kind of tile, wire."""
    joined: dict[str, dict[str, list[tuple[int, int, str, str]]]] = defaultdict(lambda: defaultdict(list))
    for entry in connections:
        (x, y), (one, other) = entry["grid_deltas"], entry["tile_types"]
        for wire, opposite in entry["wire_pairs"]:
            joined[one][wire].append((x, y, other, opposite))
            joined[other][opposite].append((-x, -y, one, wire))
    return joined
