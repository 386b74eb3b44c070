"""nextpnr's chip database as a file in memory: its structures, numbers, pointers, arrays and names.

A pointer counts bytes from where it is itself; an array is a pointer and the number of its items. What an array has no
room for goes to the end of the file.

Source: nextpnr 0.11, himbaechel/chipdb.h (the file's structures).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ChipFile"]

# Bytes of the structures, and offsets in them: of the chip, of a kind of tile, a block in it, a block's pin, a wire, a
# pip, of a tile in its place, of a node, and of which node each wire of a tile is of.
CHIP_WIDTH, CHIP_TILES, CHIP_PLACES, CHIP_NODES, CHIP_ROUTINGS, CHIP_GRADES, CHIP_NAMES = 8, 28, 36, 44, 52, 68, 76
TILE_BYTES, TILE_BELS, TILE_WIRES, TILE_PIPS, TILE_POINTERS = 40, 4, 12, 20, (4, 12, 20, 28, 36)
BEL_BYTES, BEL_TYPE, BEL_PINS, BEL_POINTERS = 36, 4, 24, (24, 32)
PIN_BYTES, PIN_WIRE, PIN_WAY = 12, 4, 8
WIRE_BYTES, WIRE_KIND, WIRE_TIMING, WIRE_UPHILL, WIRE_DOWNHILL, WIRE_PINS = 48, 4, 16, 24, 32, 40
PIP_BYTES, PIP_SOURCE, PIP_TARGET, PIP_TIMING = 24, 0, 4, 16
PLACE_BYTES, PLACE_TILE, PLACE_ROUTING, PLACE_EXTRA = 16, 4, 8, 12
NODE_BYTES, NODE_TIMING, NODE_POINTERS = 12, 8, (0,)
ROUTING_BYTES, ROUTING_TIMING, ROUTING_POINTERS = 12, 8, (0,)


@dataclass(frozen=True)
class ChipFile:
    """A chip database in memory."""

    content: bytearray

    def number(self, offset: int) -> int:
        """The number at an offset."""
        found: int = struct.unpack_from("<i", self.content, offset)[0]
        return found

    def put(self, offset: int, *numbers: int) -> None:
        """Put numbers at an offset."""
        struct.pack_into(f"<{len(numbers)}i", self.content, offset, *numbers)

    def target(self, offset: int) -> int:
        """Follow the pointer at an offset."""
        return offset + self.number(offset)

    def array(self, offset: int, item_bytes: int) -> range:
        """Offsets of the items of the array whose pointer and length are at an offset."""
        first = self.target(offset)
        return range(first, first + self.number(offset + 4) * item_bytes, item_bytes)

    @property
    def chip(self) -> int:
        """Offset of the chip's description."""
        return self.target(0)

    def name(self, index: int) -> str:
        """The name of a number; empty for nextpnr's own names, which are not in the file."""
        names = self.target(self.chip + CHIP_NAMES)
        built_in = self.number(names)
        if index < built_in:
            return ""
        first = self.target(self.array(names + 4, 4)[index - built_in])
        return self.content[first : self.content.index(0, first)].decode()

    def add_names(self, names: Sequence[str]) -> range:
        """Add names; returns their numbers, which are larger than those of all others."""
        at = self.target(self.chip + CHIP_NAMES)
        first = self.number(at) + len(self.array(at + 4, 4))
        for pointer, name in zip(self.extend(at + 4, 4, (0,), len(names)), names, strict=True):
            self.put(pointer, self.append_bytes(name.encode() + b"\0") - pointer)
        return range(first, first + len(names))

    def append(self, *numbers: int) -> int:
        """Put numbers at the end; returns where."""
        return self.append_bytes(struct.pack(f"<{len(numbers)}i", *numbers))

    def append_bytes(self, content: bytes | bytearray) -> int:
        """Put bytes at the end, from a multiple of four on; returns where."""
        self.content.extend(bytes(-len(self.content) % 4))
        first = len(self.content)
        self.content.extend(content)
        return first

    def point(self, offset: int, target: int, items: int) -> None:
        """Let the pointer and length at an offset stand for an array."""
        self.put(offset, target - offset, items)

    def copy(self, source: int, target: int, item_bytes: int, pointers: Sequence[int]) -> None:
        """Copy a structure to where there is room for it; what its pointers, at these offsets in it, point to stays."""
        self.content[target : target + item_bytes] = self.content[source : source + item_bytes]
        for pointer in pointers:
            self.put(target + pointer, self.target(source + pointer) - target - pointer)

    def extend(self, offset: int, item_bytes: int, pointers: Sequence[int], more: int) -> range:
        """Move the array whose pointer is at an offset to the end, with room for `more` items; returns the room."""
        items = self.array(offset, item_bytes)
        first = self.append_bytes(bytes(item_bytes * (len(items) + more)))
        for at, item in enumerate(items):
            self.copy(item, first + at * item_bytes, item_bytes, pointers)
        self.point(offset, first, len(items) + more)
        room = first + len(items) * item_bytes
        return range(room, room + more * item_bytes, item_bytes)
