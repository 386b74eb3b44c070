"""Delays of routes in a decoded bitstream, and of the parts of cells, by prjxray's database, at the slow corner."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.decode.fabric import Fabric, SitePin
from nearflash.boards.open.decode.paths import Delay
from nearflash.boards.open.nextpnr.sdf import Entry, read_cells

__all__ = ["NONE", "Figures", "Node", "Pip", "PipFabric", "Routes", "find_limits"]

NONE = Delay(0, 0)
_CHECKS = {"SETUP": "setup", "RECOVERY": "setup", "HOLD": "hold", "REMOVAL": "hold"}
_Wire = tuple[str, str]
_SWITCH_BOXES = ("INT_L", "INT_R")
Node = tuple[_Wire, ...]
"""The wires that are one, in order."""
Pip = tuple[str, str, str]
"""Tile, and the wires that a pip leads from and to."""


class PipFabric(Fabric):
    """A fabric that states the pips of its routes."""

    def __init__(self, database: PartDatabase, features: Mapping[str, frozenset[str]]) -> None:
        super().__init__(database, features)
        self._nodes: dict[_Wire, Node] = {}

    def step(self, wire: _Wire) -> tuple[list[_Wire], tuple[str, str, str] | None]:
        """The node of a driven wire, and tile, source and target of the pip that drives it; None: a site does."""
        node = self._node(wire)
        before = self._step(node, wire)
        if not isinstance(before, list):
            return node, None
        tile, origin = before[0]
        fixed = self.kind(tile).fixed
        targets = [name for place, name in node if place == tile
                   and (self._pips.get((tile, name)) == origin or origin in fixed.get(name, ()))]  # fmt: skip
        return node, (tile, origin, targets[0])

    def find_node(self, wire: _Wire) -> Node:
        """The node of a wire."""
        if wire not in self._nodes:
            node = tuple(self._node(wire))
            self._nodes.update(dict.fromkeys(node, node))
        return self._nodes[wire]

    def is_switch(self, pip: Pip) -> bool:
        """Whether a pip is of a switch box, where bits turn it on."""
        return self.database.tiles[pip[0]]["type"] in _SWITCH_BOXES and pip[1] in self._switches(pip[0])[1][pip[2]]

    def list_switches(self, node: Node, *, into: bool = False) -> Iterator[Pip]:
        """Pips of switch boxes that lead from a node, or into it."""
        for tile, wire in node:
            if self.database.tiles[tile]["type"] in _SWITCH_BOXES:
                for other in self._switches(tile)[into].get(wire, ()):
                    yield (tile, other, wire) if into else (tile, wire, other)

    def is_free(self, node: Node) -> bool:
        """Whether nothing drives a node, and no site's pin lies on it."""
        return not any(
            wire in self._pips or wire[1] in self._pin_wires(wire[0]) or wire[1].endswith(("GND_WIRE", "VCC_WIRE"))
            for wire in node
        )

    def is_read(self, node: Node) -> bool:
        """Whether a pip that is on leads from a node, or a site's pin lies on it."""
        return any(wire in self._pin_wires(tile) for tile, wire in node) or any(
            self._pips.get((tile, to)) == origin for tile, origin, to in self.list_switches(node)
        )

    def turn_on(self, pip: Pip) -> None:
        """Turn a pip on. Raises FormatError where another one drives its wire."""
        self._sources.clear()
        self._add(pip[0], frozenset([f"{pip[2]}.{pip[1]}"]))

    def turn_off(self, pip: Pip) -> None:
        """Turn a pip off."""
        self._sources.clear()
        del self._pips[pip[0], pip[2]]

    def _pin_wires(self, tile: str) -> frozenset[str]:
        return _pin_wires(self.database, self.database.tiles[tile]["type"])

    def _switches(self, tile: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        return _list_switches(self.database, self.database.tiles[tile]["type"])


class Routes:
    """Delays of routes, from a site's output pin to behind an input pin.

    A pip has a delay and a resistance, a wire a resistance and a capacitance. What drives a node charges all its wires:
    (resistance of the pip or of the output pin + half of the node's) · the node's capacitance.
    """

    def __init__(self, fabric: PipFabric) -> None:
        self._fabric = fabric
        self._delays: dict[_Wire, Delay] = {}
        self._pips: dict[str, dict[_Wire, tuple[Delay, float]]] = {}

    def find(self, pin: SitePin, source: SitePin) -> Delay:
        """The delay from `source`, which drives the pin, to behind the pin."""
        description = self._fabric.sites(pin.tile)[pin.site]["site_pins"][pin.pin]
        driver = self._fabric.sites(source.tile)[source.site]["site_pins"][source.pin]
        way: list[tuple[list[_Wire], tuple[str, str, str] | None]] = []
        wire = pin.tile, description["wire"]
        while wire not in self._delays:
            node, before = self._fabric.step(wire)
            way.append((node, before))
            if before is None:
                break
            wire = before[0], before[1]
        delay = self._delays.get(wire, NONE)
        for node, before in reversed(way):
            step = self.find_step(node, before) if before else self._load(node, float(driver.get("res") or 0))
            delay = delay.after(step)
            self._delays.update(dict.fromkeys(node, delay))
        return _slow(description.get("delay")).after(delay)

    def find_step(self, node: Iterable[_Wire], pip: Pip) -> Delay:
        """The delay of a pip and of the node that it drives."""
        delay, resistance = self._pip(*pip)
        return delay.after(self._load(node, resistance))

    def _pip(self, tile: str, source: str, target: str) -> tuple[Delay, float]:
        kind = self._fabric.database.tiles[tile]["type"]
        if kind not in self._pips:
            self._pips[kind] = {
                (pip["src_wire"], pip["dst_wire"]): (_slow(pip["src_to_dst"].get("delay")),
                                                     float(pip["src_to_dst"].get("res") or 0))
                for pip in self._fabric.database.tile_type(kind)["pips"].values()
            }  # fmt: skip
        return self._pips[kind].get((source, target), (NONE, 0.0))

    def _load(self, node: Iterable[_Wire], resistance: float) -> Delay:
        """Charging a node behind a resistance; resistance times capacitance is millionths of ns in prjxray's units."""
        wires = [self._fabric.kind(tile).wires[name] or {} for tile, name in node]
        capacitance = sum(float(wire.get("cap") or 0) for wire in wires)
        own = sum(float(wire.get("res") or 0) for wire in wires)
        ps = round((resistance + own / 2) * capacitance / 1000)
        return Delay(ps, ps)


class Figures:
    """Entries of SDF files, by a name of the file, the part of a slice (elsewhere empty), and the pins."""

    def __init__(self, database: PartDatabase, files: Mapping[str, str]) -> None:
        #: Texts of the files by name.
        self.texts = {name: database.delays(file) for name, file in files.items()}
        self._entries: dict[tuple[str, ...], list[tuple[str, Entry]]] = defaultdict(list)
        for name, text in self.texts.items():
            for cell in read_cells(text):
                for entry in cell.entries:
                    part = cell.instance.rpartition("/")[2] if "/" in cell.instance else ""
                    self._entries[name, part, entry.source, entry.target].append((cell.kind, entry))

    def find(self, name: str, part: str, source: str, target: str, kinds: str = "") -> Delay | None:
        """A delay; of several the widest, of none None. kinds: what the types of cells begin with."""
        found = [entry.numbers[-2:] for kind, entry in self._entries.get((name, part, source, target), ())
                 if entry.kind not in _CHECKS and kind.startswith(kinds)]  # fmt: skip
        return Delay(min(least for least, _ in found), max(most for _, most in found)) if found else None

    def delay(self, name: str, part: str, source: str, target: str, kinds: str = "") -> Delay:
        """As `find`. Raises FormatError where there is none."""
        found = self.find(name, part, source, target, kinds)
        if found is None:
            place = f"{name} {part}".strip()
            raise FormatError(f"the database must have a delay of {place} from {source} to {target}, not none")
        return found

    def check(self, name: str, part: str, pin: str, clock: str, kinds: str = "") -> dict[str, int]:
        """Setup and hold of a pin, as far as they are known."""
        entries = self._entries.get((name, part, pin, clock), ())
        return find_limits(entry for kind, entry in entries if kind.startswith(kinds))


@cache
def _pin_wires(database: PartDatabase, tile_type: str) -> frozenset[str]:
    """Wires of a kind of tile that pins of its sites lie on."""
    sites = database.tile_type(tile_type)["sites"]
    return frozenset(pin["wire"] for site in sites for pin in site["site_pins"].values() if pin)


@cache
def _list_switches(database: PartDatabase, tile_type: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Pips of a kind of tile that bits turn on, from each wire and into each wire."""
    following: dict[str, list[str]] = defaultdict(list)
    preceding: dict[str, list[str]] = defaultdict(list)
    known = {name for names in database.index_features(tile_type, "CLB_IO_CLK").values() for name, _, _ in names}
    for pip in database.tile_type(tile_type)["pips"].values():
        if f"{pip['dst_wire']}.{pip['src_wire']}" in known:
            following[pip["src_wire"]].append(pip["dst_wire"])
            preceding[pip["dst_wire"]].append(pip["src_wire"])
    return following, preceding


def find_limits(entries: Any) -> dict[str, int]:
    """Setup and hold among the entries of one pin and clock.

    A hold's two numbers belong to the most and the least that the pin before it takes; earliest arrivals meet the last.
    """
    found: dict[str, int] = {}
    for entry in entries:
        if what := _CHECKS.get(entry.kind):
            number = entry.most if what == "setup" else entry.numbers[-1]
            found[what] = max(number, found.get(what, number))
    return found


def _slow(corners: Any) -> Delay:
    """The slow corner's least and most of prjxray's four numbers in ns."""
    return Delay(*(round(float(number) * 1000) for number in corners[2:])) if corners else NONE
