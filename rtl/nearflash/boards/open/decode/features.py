"""From the set bits of a bitstream to the features that they are, by prjxray's database; the inverse of `assemble`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nearflash.boards.open.database import FRAME_WORDS, WORD_BITS, PartDatabase
from nearflash.boards.open.frames import Place

__all__ = ["DecodedBits", "decode_bits"]

_Spot = tuple[int, int]
"""Frame and bit within a tile's block."""


@dataclass(frozen=True)
class DecodedBits:
    """Features by tile, and the bits that belong to none of them."""

    features: Mapping[str, frozenset[str]]
    unexplained: frozenset[Place]


def decode_bits(database: PartDatabase, bits: Iterable[Place], tiles: Iterable[str] | None = None) -> DecodedBits:
    """Read all features whose bits are as the database wants them, at least one of them set.

    tiles: those whose features are read; all.
    """
    words: dict[tuple[int, int], list[int]] = defaultdict(list)
    unexplained = set(bits)
    for frame, word, bit in unexplained:
        words[frame, word].append(bit)
    features: dict[str, frozenset[str]] = {}
    for tile in database.tiles if tiles is None else tiles:
        description = database.tiles[tile]
        found: set[str] = set()
        for kind, block in description.get("bits", {}).items():
            there = _list_set(block, words)
            if there:
                alias = block.get("alias", {})
                names = {other: own for own, other in alias.get("sites", {}).items()}
                index = database.index_features(alias.get("type", description["type"]), kind)
                for name, wanted in _match(index, there):
                    site, dot, rest = name.partition(".")
                    found.add(names.get(site, site) + dot + rest)
                    unexplained.difference_update(there[spot] for spot in wanted)
        if found:
            features[tile] = frozenset(found)
    return DecodedBits(features, frozenset(unexplained))


def _list_set(block: Mapping[str, Any], words: Mapping[tuple[int, int], list[int]]) -> dict[_Spot, Place]:
    """The bits of a tile's block that are set, by where the database has them."""
    first, low = int(block["baseaddr"], 16), block["offset"]
    origin = low - (block.get("alias") or {}).get("start_offset", 0)
    return {
        (frame, (word - origin) * WORD_BITS + bit): (first + frame, word, bit)
        for frame in range(block["frames"])
        for word in range(low, min(low + block["words"], FRAME_WORDS))
        for bit in words.get((first + frame, word), ())
    }


def _match(
    index: Mapping[_Spot, list[tuple[str, frozenset[_Spot], frozenset[_Spot]]]], there: Mapping[_Spot, Place]
) -> Iterable[tuple[str, frozenset[_Spot]]]:
    for spot in there:
        for name, wanted, unwanted in index.get(spot, ()):
            if there.keys() >= wanted and there.keys().isdisjoint(unwanted):
                yield name, wanted
