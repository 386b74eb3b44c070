"""prjxray's database of one part: which bits of which configuration frames each feature sets and clears.

Tiles lie in a grid (`tilegrid.json`), each with the first frame and word of its bits; the bits of a kind of tile are in
`segbits_<kind>.db` and `segbits_<kind>.block_ram.db`; wires that are always connected are in `ppips_<kind>.db` and have
no bits.

Source: Project X-Ray's documentation of its database formats.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nearflash.abi.errors import ConfigError
from nearflash.boards.open.fasm import Feature
from nearflash.boards.open.packages import SidPrograms

__all__ = ["FRAME_WORDS", "WORD_BITS", "Bit", "PartDatabase", "open_database"]

#: 32-bit words of a configuration frame of the 7 series (AMD UG470).
FRAME_WORDS = 101

WORD_BITS = 32
_LUT_PIN = re.compile("[A-D][1-6]")
#: The family that a part's device belongs to.
_FAMILIES = {"xc7z": "zynq7", "xc7a": "artix7", "xc7k": "kintex7", "xc7s": "spartan7"}


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
        self._fabric = folder / _mapping(folder / "mapping/devices.yaml")[self.device]["fabric"]
        #: Entries of the part's grid by tile: type, place, sites, blocks of bits.
        self.tiles: dict[str, Any] = json.loads((self._fabric / "tilegrid.json").read_text())
        self._places = {(tile.get("grid_x"), tile.get("grid_y")): name for name, tile in self.tiles.items()}
        self._segment_bits = cache(self._read_segment_bits)
        #: Features of a kind of tile and block, at the first bit that each sets: name, bits set, bits clear.
        self.index_features = cache(self._index_features)
        #: Features of a kind of tile that set no bit: what its multiplexers do where nothing is set.
        self.list_clear = cache(self._list_clear)
        #: The kinds of wires of a kind of tile that have no bits, by feature: always, default or hint.
        self.fixed_wires = cache(self._read_fixed_wires)
        #: Directions of the pins of a kind of site: IN or OUT.
        self.pin_directions = cache(self._read_pin_directions)
        #: A kind of tile's wires, sites and pins, as the database has them.
        self.tile_type = cache(self._read_tile_type)

    def find_tile(self, column: int, row: int) -> str | None:
        """The tile at a place of the grid, None outside it."""
        return self._places.get((column, row))

    def find_tiles(self, site_type: str) -> list[str]:
        """Tiles with a site of a type."""
        return [tile for tile, entry in self.tiles.items() if site_type in entry.get("sites", {}).values()]

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

    def lut_pins(self) -> dict[str, int]:
        """Delays of LUT input pins, ps, by the wire of the tile at them (CLBLM_M_A1): the largest of the corners."""
        delays: dict[str, int] = {}
        for path in sorted(self.folder.glob("tile_type_CLB*.json")):
            for site in json.loads(path.read_text())["sites"]:
                for name, pin in site["site_pins"].items():
                    if pin and _LUT_PIN.fullmatch(name):
                        delays[pin["wire"]] = max(_ps(pin["delay"]), delays.get(pin["wire"], 0))
        return delays

    def frames(self) -> Iterator[int]:
        """Addresses of all frames that tiles have bits in; some come twice."""
        for tile in self.tiles.values():
            for block in tile.get("bits", {}).values():
                first = int(block["baseaddr"], 16)
                yield from range(first, first + block["frames"])

    def bits(self, feature: Feature) -> tuple[Bit, ...] | None:
        """List bits that a feature sets and clears, none for a wire that is always there; None for an unknown one."""
        tile = self.tiles.get(feature.tile)
        if tile is None:
            return None
        for kind, block in tile.get("bits", {}).items():
            known = self._segment_bits(block.get("alias", tile)["type"], kind)
            name = _alias(feature.name, block)
            for spelled in _spellings(name, feature.index):
                if spelled in known:
                    return tuple(_place_bit(block, each) for each in known[spelled])
        return () if feature.name in self.fixed_wires(tile["type"]) else None

    def connections(self) -> Any:
        """Wires of neighbouring tiles that are one node: by kinds of tiles and their distance."""
        return json.loads((self._fabric / "tileconn.json").read_text())

    def _read_pin_directions(self, site_type: str) -> dict[str, str]:
        pins = json.loads((self.folder / f"site_type_{site_type}.json").read_text())["site_pins"]
        return {name: pin["direction"] for name, pin in pins.items()}

    def _index_features(self, tile_type: str, kind: str) -> dict[Any, Any]:
        index: dict[Any, Any] = {}
        for name, bits in self._segment_bits(tile_type, kind).items():
            there, clear = _spots(bits, True), _spots(bits, False)
            if there:
                index.setdefault(min(there), []).append((name, there, clear))
        return index

    def _list_clear(self, tile_type: str) -> tuple[str, ...]:
        known = self._segment_bits(tile_type, "CLB_IO_CLK")
        return tuple(name for name, bits in known.items() if not _spots(bits, True))

    def _read_fixed_wires(self, tile_type: str) -> dict[str, str]:
        return {name: kind for name, kind in _rows(self.folder, f"ppips_{tile_type.lower()}.db")}

    def _read_tile_type(self, tile_type: str) -> Any:
        path = self.folder / f"tile_type_{tile_type}.json"
        return json.loads(path.read_text()) if path.exists() else {"wires": {}, "sites": [], "pips": {}}

    def _read_segment_bits(self, tile_type: str, kind: str) -> dict[str, tuple[str, ...]]:
        suffix = ".block_ram" if kind == "BLOCK_RAM" else ""
        return {name: tuple(bits) for name, *bits in _rows(self.folder, f"segbits_{tile_type.lower()}{suffix}.db")}


def open_database(programs: SidPrograms, part: str) -> PartDatabase:
    """The database of a part that the flow's programs bring. Raises ConfigError for a part that it does not have."""
    return PartDatabase(programs.bit_database(_FAMILIES[part[:4]]), part)


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
    return Bit(int(block["baseaddr"], 16) + frame, offset + bit // WORD_BITS, bit % WORD_BITS, text[0] != "!")


def _spots(bits: Iterable[str], is_set: bool) -> frozenset[tuple[int, int]]:
    """Frame and bit of a feature's bits that are to be set, or clear."""
    return frozenset((int(frame), int(bit)) for text in bits if (text[0] != "!") is is_set
                     for frame, bit in [text.lstrip("!").split("_")])  # fmt: skip


def _ps(corners: Sequence[str]) -> int:
    return round(max(map(float, corners)) * 1000)


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
