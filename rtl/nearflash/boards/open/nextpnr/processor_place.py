"""The processor block of a Zynq-7000 where its pins in use are, for nextpnr's placer, and no logic behind it.

For the placer all pins of a block are in the block's tile. The processor block's is (32, 51) on an XC7Z020, while the
pins of its port HP0 enter the fabric at (51, 96) to (51, 103): logic at a port was drawn 60 tiles away from it. Here
the block moves to the empty tile that is nearest to the middle of its pins in use. That tile gets a kind of its own,
with the block and one wire for each pin, which is of one node with the wire that was the pin's. Names, pips and delays
stay.

The block fills two thirds of the columns behind its pins. The static placer spreads cells over it as well, and puts
them into the nearest tiles when it looks for legal places: on an XC7Z020 the columns before the block are twice as full
as others. So the logic of the columns behind the pins, a tenth of the part's, is left out: what remains is a rectangle.

Source: nextpnr 0.11, himbaechel/chipdb.h (nodes: RelNodeRefPOD), himbaechel/arch.h (which wires are one node),
common/place/placer_static.cc (`insert_dark`, legalisation).
"""

import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from nearflash.abi.errors import FormatError
from nearflash.boards.open.nextpnr import chip_file as at
from nearflash.boards.open.nextpnr.chip_file import ChipFile

__all__ = ["move_processor", "processor_pins"]

_BLOCK = "PS7"
_FABRIC = "INT"
"""What names of tiles begin with in which wires of the fabric are."""
_LOGIC = ("SLICE_", "RAMB", "DSP48")
"""What names of blocks begin with that the placer spreads."""
_LOCAL, _ROOT = 0x7000, 0x7001
"""In place of a distance: a wire that is no node's, and the first wire of a node."""
_WIRE_OF_NODE = struct.Struct("<hhH")
_STEPS = 400
"""Wires between a pin and the fabric at most."""


def processor_pins(cells: Mapping[str, Any]) -> set[str]:
    """Pins of the processor block among a netlist's cells (yosys' JSON) that other cells drive or read."""
    found, others = set(), set()
    for cell in cells.values():
        if cell["type"] != _BLOCK:
            others |= {bit for bits in cell.get("connections", {}).values() for bit in bits}
    for cell in cells.values():
        if cell["type"] == _BLOCK:
            for port, bits in cell.get("connections", {}).items():
                pins = [port] if len(bits) == 1 else [f"{port}{index}" for index in range(len(bits))]
                found |= {pin for pin, bit in zip(pins, bits, strict=True) if isinstance(bit, int) and bit in others}
    return found


def move_processor(file: ChipFile, pins: Collection[str]) -> tuple[int, int] | None:
    """Move the block to its `pins` (`SAXIHP0RDATA12`) and leave out the logic behind them.

    Returns the block's column and row, None where there is nothing to move.

    There is nothing on a device without a processor block, or where none of the pins enters the fabric.
    Raises FormatError where a pin's wire is of a node already: this knows of no such block.
    """
    grid = _Grid(file)
    with_block, without_use = (
        {kind for kind in range(len(grid.tiles)) if has(kind)} for has in (grid.block, grid.is_empty)
    )
    places = [place for place, kind in enumerate(grid.kinds) if kind in with_block]
    if len(places) != 1:
        return None
    block = _Block(grid, places[0])
    entries = [entry for pin, wire, way in block.pins if pin in pins for entry in [grid.entry(places[0], wire, way)]
               if entry is not None]  # fmt: skip
    empty = [place for place, kind in enumerate(grid.kinds) if kind in without_use]
    if not entries or not empty:
        return None
    column, row = (median(axis) for axis in zip(*map(grid.position, entries), strict=True))

    def distance(place: int) -> tuple[float, int]:
        x, y = grid.position(place)
        return abs(x - column) + abs(y - row), place

    home = min(empty, key=distance)
    before = grid.position(places[0])[0]
    grid.leave_out(lambda x: (x - column) * (before - column) > 0)  # on the block's side of its pins
    block.move(home)
    return grid.position(home)


class _Grid:
    """The tiles of a chip database in their places, row by row, and the nodes that join their wires."""

    def __init__(self, file: ChipFile) -> None:
        self.file = file
        self.width = file.number(file.chip + at.CHIP_WIDTH)

    @cached_property
    def places(self) -> range:
        return self.file.array(self.file.chip + at.CHIP_PLACES, at.PLACE_BYTES)

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of tile in each place."""
        return [self.file.number(place + at.PLACE_TILE) for place in self.places]

    @property
    def tiles(self) -> range:
        return self.file.array(self.file.chip + at.CHIP_TILES, at.TILE_BYTES)

    @cached_property
    def names(self) -> list[str]:
        """The name of each kind of tile."""
        return [self.file.name(self.file.number(tile)) for tile in self.tiles]

    def routing(self, place: int) -> int:
        """Find the table that names the nodes of a place's wires."""
        routings = self.file.array(self.file.chip + at.CHIP_ROUTINGS, at.ROUTING_BYTES)
        return routings[self.file.number(self.places[place] + at.PLACE_ROUTING)]

    def position(self, place: int) -> tuple[int, int]:
        """Column and row."""
        return place % self.width, place // self.width

    def bels(self, kind: int) -> Iterator[tuple[int, str]]:
        """List the place and the name of each block of a kind of tile."""
        for bel in self.file.array(self.tiles[kind] + at.TILE_BELS, at.BEL_BYTES):
            yield bel, self.file.name(self.file.number(bel))

    def block(self, kind: int) -> int:
        """Find the processor block of a kind of tile, 0 where it has none."""
        return next((bel for bel, name in self.bels(kind) if name.endswith(f".{_BLOCK}")), 0)

    def has_logic(self, kind: int) -> bool:
        """Whether a kind of tile has blocks of logic."""
        return any(name.startswith(_LOGIC) for _, name in self.bels(kind))

    def is_empty(self, kind: int) -> bool:
        """Whether a kind of tile has no blocks, and at most the one wire that even a tile without a use has."""
        tile = self.tiles[kind]
        return not self.file.number(tile + at.TILE_BELS + 4) and self.file.number(tile + at.TILE_WIRES + 4) <= 1

    def wires(self, kind: int) -> range:
        return self.file.array(self.tiles[kind] + at.TILE_WIRES, at.WIRE_BYTES)

    def leave_out(self, behind: Callable[[int], bool]) -> None:
        """Take the blocks of logic out of the tiles in columns that are `behind`; wires and pips stay."""
        file, made = self.file, len(self.tiles)
        logic = {kind for kind in range(made) if self.has_logic(kind)}
        without = {place: kind for place, kind in enumerate(self.kinds)
                   if kind in logic and behind(self.position(place)[0])}  # fmt: skip
        kinds = sorted(set(without.values()))
        rooms = file.extend(file.chip + at.CHIP_TILES, at.TILE_BYTES, at.TILE_POINTERS, len(kinds))
        for kind, room in zip(kinds, rooms, strict=True):
            file.copy(self.tiles[kind], room, at.TILE_BYTES, at.TILE_POINTERS)
            file.put(room + at.TILE_BELS, 0, 0)
        for place, kind in without.items():
            self.kinds[place] = made + kinds.index(kind)
            file.put(self.places[place] + at.PLACE_TILE, self.kinds[place])

    def entry(self, place: int, wire: int, way: int) -> int | None:
        """The place in the fabric that a pin's wire comes from (`way` 0: an input) or leads to first."""
        pips_of, end = (at.WIRE_UPHILL, at.PIP_SOURCE) if way == 0 else (at.WIRE_DOWNHILL, at.PIP_TARGET)
        seen, todo = {(place, wire)}, deque([(place, wire)])
        for _ in range(_STEPS):
            if not todo:
                break
            for there, index in self._node(*todo.popleft()):
                kind = self.kinds[there]
                if self.names[kind].startswith(_FABRIC):
                    return there
                pips = self.file.array(self.tiles[kind] + at.TILE_PIPS, at.PIP_BYTES)
                for item in self.file.array(self.wires(kind)[index] + pips_of, 4):
                    step = there, self.file.number(pips[self.file.number(item)] + end)
                    if step not in seen:
                        seen.add(step)
                        todo.append(step)
        return None

    def _node(self, place: int, wire: int) -> Iterator[tuple[int, int]]:
        """Places and wires that are one node with a wire."""
        x, y, first = self._wire(place, wire)
        if x == _LOCAL:
            yield place, wire
            return
        if x != _ROOT:
            place, wire = place + y * self.width + x, first
            x, y, first = self._wire(place, wire)
        node = self.file.array(self.file.chip + at.CHIP_NODES, at.NODE_BYTES)[first << 16 | y & 0xFFFF]
        for item in self.file.array(node, _WIRE_OF_NODE.size):
            x, y, index = _WIRE_OF_NODE.unpack_from(self.file.content, item)
            yield place + y * self.width + x, index

    def _wire(self, place: int, wire: int) -> tuple[int, int, int]:
        """Which node a wire is of: distance to the node's first wire and its index there, or one of the marks."""
        wires = self.file.array(self.routing(place), _WIRE_OF_NODE.size)
        if wire >= len(wires):
            return _LOCAL, 0, 0
        found: tuple[int, int, int] = _WIRE_OF_NODE.unpack_from(self.file.content, wires[wire])
        return found


@dataclass(frozen=True)
class _Block:
    """The processor block in its place."""

    grid: _Grid
    place: int

    @property
    def pins(self) -> Iterator[tuple[str, int, int]]:
        """Name, wire and way of each pin."""
        file, kind = self.grid.file, self.grid.kinds[self.place]
        wires = self.grid.wires(kind)
        for pin in file.array(self.grid.block(kind) + at.BEL_PINS, at.PIN_BYTES):
            wire = file.number(pin + at.PIN_WIRE)
            name = file.name(file.number(wires[wire])).rpartition(".")[2]
            yield name, wire, file.number(pin + at.PIN_WAY)

    def move(self, home: int) -> None:
        """Move the block to an empty place."""
        file, grid = self.grid.file, self.grid
        wires = [wire for _, wire, _ in self.pins]
        nodes = self._join(home, wires)
        self._route(home, wires, nodes)
        kind = self._tile(home, wires)
        extra = file.target(grid.places[self.place] + at.PLACE_EXTRA)
        file.put(grid.places[home] + at.PLACE_TILE, kind)
        file.put(grid.places[home] + at.PLACE_EXTRA, extra - grid.places[home] - at.PLACE_EXTRA)

    def _join(self, home: int, wires: list[int]) -> int:
        """A node for each wire: the one of before, and one at home. Returns the first node's number."""
        file, grid = self.grid.file, self.grid
        old = grid.wires(grid.kinds[self.place])
        (x, y), (to_x, to_y) = grid.position(self.place), grid.position(home)
        head = file.chip + at.CHIP_NODES
        first = file.number(head + 4)
        for index, room in enumerate(file.extend(head, at.NODE_BYTES, at.NODE_POINTERS, len(wires))):
            both = (0, 0, wires[index]), (to_x - x, to_y - y, index)
            file.point(room, file.append_bytes(b"".join(_WIRE_OF_NODE.pack(*each) for each in both)), 2)
            file.put(room + at.NODE_TIMING, file.number(old[wires[index]] + at.WIRE_TIMING))
        return first

    def _route(self, home: int, wires: list[int], nodes: int) -> None:
        """Tell of the wires in both places which node they are of."""
        file, grid = self.grid.file, self.grid
        (x, y), (to_x, to_y) = grid.position(self.place), grid.position(home)
        known = file.array(grid.routing(self.place), _WIRE_OF_NODE.size)
        here = bytearray(file.content[known.start : known.stop])
        here += _WIRE_OF_NODE.pack(_LOCAL, 0, 0) * (len(grid.wires(grid.kinds[self.place])) - len(known))
        if any(_WIRE_OF_NODE.unpack_from(here, _WIRE_OF_NODE.size * wire)[0] != _LOCAL for wire in wires):
            raise FormatError(f"wires at pins of {_BLOCK} must be of no node in a chip database of this version")
        for node, wire in enumerate(wires, nodes):
            struct.pack_into("<hHH", here, _WIRE_OF_NODE.size * wire, _ROOT, node & 0xFFFF, node >> 16)
        there = bytearray().join(_WIRE_OF_NODE.pack(x - to_x, y - to_y, wire) for wire in wires)
        head = file.chip + at.CHIP_ROUTINGS
        first = file.number(head + 4)
        rooms = file.extend(head, at.ROUTING_BYTES, at.ROUTING_POINTERS, 2)
        for number, (room, place, content) in enumerate(zip(rooms, (self.place, home), (here, there), strict=True)):
            file.point(room, file.append_bytes(content), len(content) // _WIRE_OF_NODE.size)
            file.put(room + at.ROUTING_TIMING, file.number(grid.routing(place) + at.ROUTING_TIMING))
            file.put(grid.places[place] + at.PLACE_ROUTING, first + number)

    def _tile(self, home: int, wires: list[int]) -> int:
        """A kind of tile with the block and its pins' wires, for home; the old kind loses the block. Returns it."""
        file, grid = self.grid.file, self.grid
        kind, empty = grid.kinds[self.place], grid.kinds[home]
        made = len(grid.tiles)
        (tile,) = file.extend(file.chip + at.CHIP_TILES, at.TILE_BYTES, at.TILE_POINTERS, 1)
        file.copy(grid.tiles[empty], tile, at.TILE_BYTES, at.TILE_POINTERS)
        old_bel, old_wires = grid.block(kind), grid.wires(kind)

        bel = file.append_bytes(bytes(at.BEL_BYTES))
        file.copy(old_bel, bel, at.BEL_BYTES, at.BEL_POINTERS)
        old_pins = file.array(old_bel + at.BEL_PINS, at.PIN_BYTES)
        pins = file.append_bytes(file.content[old_pins.start : old_pins.stop])
        file.point(bel + at.BEL_PINS, pins, len(wires))
        file.point(tile + at.TILE_BELS, bel, 1)

        first = file.append_bytes(bytes(at.WIRE_BYTES * len(wires)))
        file.point(tile + at.TILE_WIRES, first, len(wires))
        for index, wire in enumerate(wires):
            new, old = first + at.WIRE_BYTES * index, old_wires[wire]
            file.copy(old, new, at.WIRE_UPHILL, ())
            pin = pins + at.PIN_BYTES * index
            file.put(pin + at.PIN_WIRE, index)
            file.point(new + at.WIRE_PINS, file.append(0, file.number(pin)), 1)
            for where in (new + at.WIRE_UPHILL, new + at.WIRE_DOWNHILL, old + at.WIRE_PINS):
                file.put(where, 0, 0)
        file.put(grid.tiles[kind] + at.TILE_BELS, 0, 0)
        return made
