"""Mutations of files: damage, forgery under checksums that hold, and valid pieces in a place that is not theirs."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearflash.abi.errors import NearflashError
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.sealed import seal

__all__ = [
    "FILE",
    "Files",
    "FuzzedFormat",
    "Range",
    "damage",
    "forge_json",
    "json_pieces",
    "line_pieces",
    "pieces",
    "range_pieces",
    "seal_block",
    "text_files",
]

FILE = "file"
"""The name of a format's only file."""
Files = Mapping[str, bytes]
Mutate = Callable[[random.Random], Files]
Range = tuple[str, int, int]
"""Of a file: its first byte, and the one behind its last."""
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, 1 << 40, 10**12, 10**400, "", "p", "a\0b", "\ud800", [], {}, [[]], [0] * 5, {"p": []},
    float("nan"),
)  # fmt: skip


@dataclass
class FuzzedFormat:
    """A file format: intact files, how they are read, and how they are forged and mixed."""

    files: Files
    read: Callable[[Path], object]
    """Everything that a folder of these files holds, as values that can be compared."""
    forge: Mutate
    misdirect: Mutate
    older: Sequence[object] = ()
    """What they may be read as, too: states of before, where the end of a file may be lost."""
    sealed: bool = True
    """They carry checksums; without them other values that make sense count as forged, not as silent."""
    accepts: Callable[[object, object], bool] = field(default=lambda content, expected: False)
    """Whether other values than those expected are right, too: a beginning of them."""


def damage(files: Files, rng: random.Random) -> Files:
    """Some bits or bytes of a file changed, a span of zeros, or an end that is missing or too much."""
    name = rng.choice(sorted(files))
    return {**files, name: _damage(files[name], rng)}


def _damage(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    # Half of them near the beginning, where headers are.
    limit = len(data) if rng.random() < 0.5 else min(len(data), 4 * BLOCK_BYTES)
    match rng.randrange(6):
        case 0:
            return bytes(data[: rng.randrange(len(data))])
        case 1:
            return bytes(data) + rng.randbytes(rng.choice([1, 8, BLOCK_BYTES]))
        case 2:
            start = rng.randrange(limit)
            data[start : start + 512] = bytes(min(512, len(data) - start))
        case _:
            for _ in range(rng.choice([1, 1, 1, 4])):
                data[rng.randrange(limit)] ^= 1 << rng.randrange(8)
    return bytes(data)


# Forgery


def forge_json(body: Any, rng: random.Random) -> Any:
    """The value with one of its parts replaced, taken away, or doubled."""
    body = json.loads(json.dumps(body))
    places = _places(body)
    if not places or rng.random() < 0.02:
        return rng.choice(STRANGE[:-1])
    node, key = rng.choice(places)
    if rng.random() < 0.2:
        del node[key]
    elif rng.random() < 0.2 and isinstance(node, list):
        node.append(node[key])
    elif rng.random() < 0.3 and type(node[key]) is int:
        node[key] = max(0, node[key] + rng.choice([-1, 1, 32, 1024, 1 << 33]))
    else:
        node[key] = rng.choice(STRANGE)
    return body


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every container within a JSON value, with every key of it."""
    places: list[tuple[Any, Any]] = []
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        places.append((node, key))
        places += _places(node[key])
    return places


def seal_block(kind: str, body: Any, size: int) -> bytes | None:
    """A sealed block with this body; None where it does not fit."""
    try:
        block: bytes = seal(kind, body, size).tobytes()
    except (NearflashError, ValueError):
        return None
    return block


# Misdirection


def pieces(intact: Files, others: Sequence[Files], unit: int) -> Mutate:
    """Whole units of bytes of these or other intact files in the place of others; or two that changed places."""

    def mix(rng: random.Random) -> Files:
        files = dict(intact)
        name = rng.choice(sorted(files))
        target = bytearray(files[name])
        source = rng.choice([intact, *others, *others])[name]
        count = max(min(len(source), len(target)) // unit, 1)
        size = unit * rng.choice([1, 1, 1, 2, 3, 8, max(count // 2, 1)])
        at = unit * rng.randrange(count)
        start = at if rng.random() < 0.5 else unit * rng.randrange(count)
        piece = source[start : start + size][: len(target) - at]
        if source is intact[name] and rng.random() < 0.5:  # change places, where they do not overlap
            target[start : start + len(piece)] = target[at : at + len(piece)]
        target[at : at + len(piece)] = piece
        if len(files) > 1 and rng.random() < 0.2:  # a whole file
            return {**intact, name: source}
        return {**files, name: bytes(target)}

    return mix


def range_pieces(
    intact: Files, others: Sequence[Files], ranges: Callable[[Files], Sequence[Range]], unit: int
) -> Mutate:
    """Whole parts, a tensor, a group, a tile, of these or other intact files in the place of one as long; now and then
    any units of bytes, as `pieces`.
    """
    places = [(files, ranges(files)) for files in (intact, *others)]
    anything = pieces(intact, others, unit)

    def mix(rng: random.Random) -> Files:
        if rng.random() < 0.3:
            return anything(rng)
        name, start, stop = rng.choice(places[0][1])
        source, known = rng.choice([places[0], *places[1:] * 2])
        alike = [part for part in known if part[2] - part[1] == stop - start and part[0] == name]
        if not alike:
            return anything(rng)
        here = (name, start, stop)
        _, first, last = here if here in alike and rng.random() < 0.5 else rng.choice(alike)
        content = intact[name]
        mixed = {**intact, name: content[:start] + source[name][first:last] + content[stop:]}
        if source is intact and rng.random() < 0.5:
            data = bytearray(mixed[name])
            data[first:last] = content[start:stop]
            mixed[name] = bytes(data)
        return mixed

    return mix


def line_pieces(intact: Files, others: Sequence[Files]) -> Mutate:
    """Whole lines of these or other intact files in the place of others or between them; one left out, or two that
    changed places.
    """

    def mix(rng: random.Random) -> Files:
        name = rng.choice(sorted(intact))
        lines = intact[name].splitlines(keepends=True)
        source = rng.choice([intact, *others, *others])[name].splitlines(keepends=True)
        at, start = rng.randrange(len(lines)), rng.randrange(len(source))
        if rng.random() < 0.4:
            start = min(at, len(source) - 1)
        match rng.randrange(4):
            case 0:
                lines[at] = source[start]
            case 1:
                lines.insert(at, source[start])
            case 2:
                del lines[at]
            case _:
                other = rng.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
        return {**intact, name: b"".join(lines)}

    return mix


def json_pieces(intact: Any, others: Sequence[Any], write: Callable[[Any], Files]) -> Mutate:
    """A part of another intact value in the place of the same part, or of another part of its kind."""

    def mix(rng: random.Random) -> Files:
        body = json.loads(json.dumps(intact))
        node, key = rng.choice(_places(body))
        others_places = _places(rng.choice([intact, *others]))
        alike = [(parent, at) for parent, at in others_places if type(parent[at]) is type(node[key])]
        same = [(parent, at) for parent, at in alike if at == key]
        parent, at = rng.choice(same if same and rng.random() < 0.7 else alike or [(node, key)])
        node[key] = parent[at]
        return write(body)

    return mix


def text_files(body: Any) -> Files:
    """A format's only file, of JSON."""
    return {FILE: json.dumps(body).encode()}
