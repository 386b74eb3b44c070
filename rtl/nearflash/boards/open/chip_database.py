"""nextpnr's chip database with a Zynq-7000's processor block corrected: where its nets enter the fabric.

For nets of hard blocks nextpnr looks from the block's pin for the first wire of a kind that routing uses, and takes
that wire's tile for the net's end: for the box that the search keeps to, and for the distance that guides it. The wires
inside the processor block have such a kind themselves, that of a tile's outputs (LOGIC_OUTS), so each net seems to end
in the middle of the block, up to 50 tiles from the column where it does; a search for one then takes seconds. Here
these wires get the kind of those between a block and the fabric, which nextpnr looks past. Names, pips and delays stay.

Source: nextpnr 0.11, himbaechel/chipdb.h (the file's structures); himbaechel/uarch/xilinx/xilinx.cc,
find_source_sink_locs and is_general_routing (the search).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nearflash.abi.errors import FormatError

__all__ = ["correct_processor"]

_MAGIC, _VERSION = 0x00CA7CA7, 6
# Bytes of the structures, and offsets in them.
_TILE_BYTES, _TILE_WIRES = 40, 12
_WIRE_BYTES, _WIRE_KIND = 48, 4
_CHIP_TILES, _CHIP_NAMES = 28, 76
#: Wires by tile whose kinds stand for all of their kind: outputs of a block's pins and of a tile; between both.
_OUTPUT, _OUTBOUND = ("PSS2", "PS7_FCLKCLK0"), ("INT_L", "LOGIC_OUTS_L0")
_BETWEEN = ("INT_INTERFACE_L", "INT_INTERFACE_BLOCK_OUTS_L_B0")
_PROCESSOR = "PSS"
"""What names of the processor block's tiles begin with."""


@dataclass(frozen=True)
class _Database:
    """A chip database in memory."""

    content: bytearray

    def number(self, offset: int) -> int:
        found: int = struct.unpack_from("<i", self.content, offset)[0]
        return found

    def target(self, offset: int) -> int:
        """What the pointer at an offset points to."""
        return offset + self.number(offset)

    def array(self, offset: int, item_bytes: int) -> range:
        """Offsets of the items of the array whose pointer and length are at an offset."""
        first = self.target(offset)
        return range(first, first + self.number(offset + 4) * item_bytes, item_bytes)

    def wires(self) -> Iterator[tuple[str, str, int]]:
        """Tile, name and offset of the kind of every wire."""
        chip = self.target(0)
        names = self.target(chip + _CHIP_NAMES)
        built_in, strings = self.number(names), self.array(names + 4, 4)

        def name(index: int) -> str:
            if index < built_in:
                return ""  # nextpnr's own names are not in the file
            first = self.target(strings[index - built_in])
            return self.content[first : self.content.index(0, first)].decode()

        for tile in self.array(chip + _CHIP_TILES, _TILE_BYTES):
            kind = name(self.number(tile))
            for wire in self.array(tile + _TILE_WIRES, _WIRE_BYTES):
                yield kind, name(self.number(wire)), wire + _WIRE_KIND


def correct_processor(source: Path, path: Path) -> int:
    """Write the chip database `source` to `path` with the processor block's wires corrected; returns how many were.

    A device without a processor block has none, and its file is equal.
    Raises FormatError for a file of another version, or one in which the kinds cannot be told.
    """
    database = _Database(bytearray(source.read_bytes()))
    try:
        chip = database.target(0)
        found = database.number(chip), database.number(chip + 4)
        if found != (_MAGIC, _VERSION):
            raise FormatError(f"{source} must be a chip database of version {_VERSION}, not {found[0]:#x}, {found[1]}")
        wires = list(database.wires())
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(f"{source} must be a chip database of version {_VERSION}: {error}") from error
    kinds = {(tile, name): database.number(offset) for tile, name, offset in wires}
    changed = 0
    if any(tile.startswith(_PROCESSOR) for tile, _, _ in wires):
        if missing := [where for where in (_OUTPUT, _OUTBOUND, _BETWEEN) if where not in kinds]:
            tile, name = missing[0]
            raise FormatError(f"{source} must be a chip database with the wire {name} of {tile}, whose kind is known")
        outputs = {kinds[_OUTPUT], kinds[_OUTBOUND]}
        for tile, _, offset in wires:
            if tile.startswith(_PROCESSOR) and database.number(offset) in outputs:
                struct.pack_into("<i", database.content, offset, kinds[_BETWEEN])
                changed += 1
    path.write_bytes(database.content)
    return changed
