"""Bitstreams with one used bit flipped, and whether comparing places sees it.

Used bits are those of a LUT's table that some value of its inputs reads, and those of pips on a net's way. A flip must
give a bit that no feature explains, two drivers of a wire, or another function or driver.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nearflash.abi.errors import FormatError
from nearflash.boards.open.decode.cells import View
from nearflash.boards.open.decode.features import decode_bits
from nearflash.boards.open.decode.netlist import DecodedNetlist
from nearflash.boards.open.fasm import Feature
from nearflash.boards.open.frames import Place

__all__ = ["BitMutants", "Mutant"]


@dataclass(frozen=True, order=True)
class Mutant:
    """A bit of a tile's feature; `used_by` is a cell's key, or the tile and wire of a pin behind a pip."""

    tile: str
    feature: str
    used_by: tuple[str, ...]


class BitMutants:
    """BitMutants of a decoded bitstream. cells: of its netlist, which was read before."""

    def __init__(self, netlist: DecodedNetlist, cells: View, bits: Iterable[Place]) -> None:
        self._netlist, self._database = netlist, netlist.fabric.database
        self._frames: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for frame, word, bit in bits:
            self._frames[frame].add((word, bit))
        self._tables, self._pips = sorted(self._list_table_bits(cells)), sorted(self._list_pips())

    def sample(self, count: int, seed: int = 1) -> list[Mutant]:
        """Choose bits of tables and pips, half each, or fewer where there are fewer."""
        chance = random.Random(seed)
        half = count // 2
        return [*chance.sample(self._tables, min(half, len(self._tables))),
                *chance.sample(self._pips, min(count - half, len(self._pips)))]  # fmt: skip

    def is_seen(self, mutant: Mutant) -> bool:
        """Whether the bitstream with that bit flipped decodes to something else at the place that uses it, or not."""
        name, _, index = mutant.feature.partition("[")
        feature = Feature(mutant.tile, name, int(index.rstrip("]")) if index else None)
        bit = next(bit for bit in self._database.bits(feature) or () if bit.is_set)
        there = self._list_near(mutant.tile)
        before = decode_bits(self._database, there, [mutant.tile])
        after = decode_bits(self._database, there ^ {(bit.frame, bit.word, bit.bit)}, [mutant.tile])
        if after.unexplained - before.unexplained:
            return True
        try:
            other = self._netlist.replace_tile(mutant.tile, after.features.get(mutant.tile, frozenset()))
            return _read(self._netlist, mutant.used_by) != _read(other, mutant.used_by)
        except FormatError:
            return True

    def _list_near(self, tile: str) -> set[Place]:
        """The set bits in a tile's blocks."""
        found = set()
        for block in self._database.tiles[tile]["bits"].values():
            first, low = int(block["baseaddr"], 16), block["offset"]
            for frame in range(first, first + block["frames"]):
                found |= {(frame, word, bit) for word, bit in self._frames.get(frame, ())
                          if low <= word < low + block["words"]}  # fmt: skip
        return found

    def _list_table_bits(self, cells: View) -> Iterator[Mutant]:
        for key, cell in cells.items():
            place, _, bel = key.rpartition(".")
            if cell.kind == "LUT" and bel.endswith("LUT"):
                nets = self._netlist.read_pins(place, [f"{bel[0]}{pin}" for pin in range(1, int(bel[1]) + 1)])
                tile, prefix = self._netlist.name_feature(place, f"{bel[0]}LUT.INIT")
                yield from (Mutant(tile, f"{prefix}[{address:02d}]", (key,))
                            for address in range(1 << len(nets)) if _reaches(nets, address))  # fmt: skip

    def _list_pips(self) -> Iterator[Mutant]:
        for (tile, wire), (origin, asked) in self._netlist.fabric.used_pips.items():
            yield Mutant(tile, f"{wire}.{origin}", asked)


def _reaches(nets: list[str], address: int) -> bool:
    """Whether inputs with these nets, of which some are constant or the same, can have the bits of an address."""
    values: dict[str, int] = {"0": 0, "1": 1}
    return all(values.setdefault(net, address >> place & 1) == address >> place & 1 for place, net in enumerate(nets))


def _read(netlist: DecodedNetlist, used_by: tuple[str, ...]) -> object:
    return netlist.read(used_by[0]) if len(used_by) == 1 else netlist.fabric.trace((used_by[0], used_by[1]))
