"""prjxray's database of one part: which bits of which configuration frames each feature sets and clears.

Tiles lie in a grid (`tilegrid.json`), each with the first frame and word of its bits; the bits of a kind of tile are in
`segbits_<kind>.db` and `segbits_<kind>.block_ram.db`; wires that are always connected are in `ppips_<kind>.db` and have
no bits.

Source: Project X-Ray's documentation of its database formats.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nearflash.abi.errors import ConfigError
from nearflash.boards.open.fasm import Feature

__all__ = ["FRAME_WORDS", "Bit", "PartDatabase"]

#: 32-bit words of a configuration frame of the 7 series (AMD UG470).
FRAME_WORDS = 101

_WORD_BITS = 32


@dataclass(frozen=True)
class Bit:
    """A bit of a frame and what a feature wants it to be."""

    frame: int
    word: int
    bit: int
    is_set: bool


class PartDatabase:
    """The database `folder` (of a family) for one part, for example xc7z020clg400-1.

    Raises ConfigError for a part that it does not have.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        parts = _mapping(folder / "mapping/parts.yaml")
        if part not in parts:
            raise ConfigError(f"part must be one of {', '.join(sorted(parts)) or 'none'}, not {part!r}")
        #: Device of the part: parts of one device differ in package and speed.
        self.device = parts[part]["device"]
        fabric = _mapping(folder / "mapping/devices.yaml")[self.device]["fabric"]
        self._tiles: dict[str, Any] = json.loads((folder / fabric / "tilegrid.json").read_text())
        self._places = {(tile.get("grid_x"), tile.get("grid_y")): name for name, tile in self._tiles.items()}
        self._segment_bits = cache(self._read_segment_bits)
        self._always = cache(self._read_always)

    def tile_at(self, column: int, row: int) -> str:
        """The tile at a place of the grid. Raises ConfigError outside it."""
        if (column, row) not in self._places:
            raise ConfigError(f"place must be in the grid of {self.device}, not ({column}, {row})")
        return self._places[column, row]

    @property
    def part_file(self) -> Path:
        """Description of the part that prjxray's own programs want."""
        return self.folder / self.part / "part.yaml"

    def list_required(self) -> list[str]:
        """FASM lines that every bitstream of the part has."""
        path = self.folder / self.part / "required_features.fasm"
        return path.read_text().splitlines() if path.exists() else []

    def delays(self, tile: str) -> str:
        """Text of the SDF file with the delays of a kind of tile (DSP_L); empty where the family has none."""
        path = self.folder / "timings" / f"{tile}.sdf"
        return path.read_text() if path.exists() else ""

    def frames(self) -> Iterator[int]:
        """Addresses of all frames that tiles have bits in; some come twice."""
        for tile in self._tiles.values():
            for block in tile.get("bits", {}).values():
                first = int(block["baseaddr"], 16)
                yield from range(first, first + block["frames"])

    def bits(self, feature: Feature) -> tuple[Bit, ...] | None:
        """List bits that a feature sets and clears, none for a wire that is always there; None for an unknown one."""
        tile = self._tiles.get(feature.tile)
        if tile is None:
            return None
        for kind, block in tile.get("bits", {}).items():
            known = self._segment_bits(block.get("alias", tile)["type"], kind)
            name = _alias(feature.name, block)
            for spelled in _spellings(name, feature.index):
                if spelled in known:
                    return tuple(_place_bit(block, each) for each in known[spelled])
        return () if feature.name in self._always(tile["type"]) else None

    def _read_segment_bits(self, tile_type: str, kind: str) -> dict[str, tuple[str, ...]]:
        suffix = ".block_ram" if kind == "BLOCK_RAM" else ""
        return {name: tuple(bits) for name, *bits in _rows(self.folder, f"segbits_{tile_type.lower()}{suffix}.db")}

    def _read_always(self, tile_type: str) -> frozenset[str]:
        return frozenset(name for name, *_ in _rows(self.folder, f"ppips_{tile_type.lower()}.db"))


def _rows(folder: Path, name: str) -> Iterator[list[str]]:
    """Rows of a file, empty where it does not exist; the tile's type is cut off the feature's name."""
    path = folder / name
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.strip():
            feature, *rest = line.split()
            yield [feature.partition(".")[2], *rest]


def _alias(name: str, block: dict[str, Any]) -> str:
    """A feature's name in the tile type that a block borrows its bits from: the site, its first part, has another."""
    if "alias" not in block:
        return name
    site, dot, rest = name.partition(".")
    return f"{block['alias']['sites'].get(site, site)}{dot}{rest}"


def _spellings(name: str, index: int | None) -> list[str]:
    """How the database writes a feature's bit: with two or three digits, or without where it is the only one."""
    if index is None:
        return [name]
    return [f"{name}[{index:02d}]", f"{name}[{index}]", f"{name}[{index:03d}]", *([name] if index == 0 else [])]


def _place_bit(block: dict[str, Any], text: str) -> Bit:
    """A bit of the database (`!31_06`: frame 31, bit 6 clear) in the frames of a tile."""
    frame, bit = map(int, text.lstrip("!").split("_"))
    offset = block["offset"] - block.get("alias", {}).get("start_offset", 0)
    return Bit(int(block["baseaddr"], 16) + frame, offset + bit // _WORD_BITS, bit % _WORD_BITS, text[0] != "!")


def _mapping(path: Path) -> dict[str, dict[str, str]]:
    """A YAML file of two levels of plain names: what the database's mappings are."""
    found: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines():
        key, _, value = (part.strip().strip("\"'") for part in line.partition(":"))
        if line[:1] not in ("", " ", "#"):
            inner = found.setdefault(key, {})
        elif value:
            inner[key] = value
    return found
