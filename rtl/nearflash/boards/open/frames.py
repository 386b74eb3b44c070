"""Configuration frames from features: what fasm2frames does, strictly.

Every frame of the part is there, so that the bitstream configures all of it. A feature that the database does not know
is an error, and so are two features of which one sets a bit that the other clears.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import FRAME_WORDS, Bit, PartDatabase
from nearflash.boards.open.fasm import Feature

__all__ = ["Place", "assemble", "read_bits", "write_frames"]

Place = tuple[int, int, int]
"""Frame address, word, bit."""

_NAMED = 10
_READ = re.compile(r"bit_([0-9a-f]{8})_(\d{3})_(\d{2})")


def assemble(database: PartDatabase, features: Iterable[Feature]) -> set[Place]:
    """The bits that are set.

    Raises FormatError that names the unknown features, or two that contradict each other.
    """
    unknown: Counter[str] = Counter()
    wanted: dict[Place, tuple[bool, Feature]] = {}
    for feature in features:
        bits = database.bits(feature)
        if bits is None:
            unknown[str(feature)] += 1
            continue
        for bit in bits:
            _claim(wanted, bit, feature)
    if unknown:
        named = ", ".join(sorted(unknown)[:_NAMED]) + (
            f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        )
        raise FormatError(f"features must be in the database of {database.part}, not {named}")
    return {place for place, (is_set, _) in wanted.items() if is_set}


def _claim(wanted: dict[Place, tuple[bool, Feature]], bit: Bit, feature: Feature) -> None:
    place = (bit.frame, bit.word, bit.bit)
    is_set, first = wanted.setdefault(place, (bit.is_set, feature))
    if is_set != bit.is_set:
        setter, clearer = (first, feature) if is_set else (feature, first)
        where = f"{bit.frame:#010x}.{bit.word}.{bit.bit}"
        raise FormatError(f"features must agree on bit {where}, which {setter} sets and {clearer} clears")


def write_frames(path: Path, frames: Iterable[int], bits: Iterable[Place]) -> None:
    """Write all `frames`, in order of address, for xc7frames2bit. Raises FormatError for a bit outside them."""
    words = {frame: [0] * FRAME_WORDS for frame in frames}
    for frame, word, bit in bits:
        if frame not in words or not 0 <= word < FRAME_WORDS:
            raise FormatError(f"bits must lie in the part's frames, not at {frame:#010x}.{word}.{bit}")
        words[frame][word] |= 1 << bit
    with path.open("w") as file:
        for frame in sorted(words):
            file.write(f"0x{frame:08X} {','.join(f'0x{word:08X}' for word in words[frame])}\n")


def read_bits(text: str) -> set[Place]:
    """The bits that are set in a bitstream, from the output of `bitread -y`."""
    return {(int(frame, 16), int(word), int(bit)) for frame, word, bit in _READ.findall(text)}
