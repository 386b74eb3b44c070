"""Crash points of the deltas beside a state: folders that a drive may hold after power was lost, read at each step.

A delta has its name when it is complete and durable, and its step is committed after that; old ones that make room may
be back. A folder in which what is asked for is there must give the weights of the step, to the bit, and every other one
a StateError; so must files that are torn under their names, as drives leave them that do not flush.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError, StreamError
from nearflash.abi.topk import ValueFormat
from nearflash.bench.storage.crashes import SECTOR_BYTES, Crashes
from nearflash.device.backends.host.delta import delta_of
from nearflash.storage.state.delta_log import DeltaLog, StepDelta, TensorMark, WeightDelta

__all__ = ["delta_crash_points"]

Words = list[NDArray[np.uint16]]
_SIZES = (20_000, 700)
"""Of the tensors; the first one goes in two pieces."""
_CUT = 8192
_KEPT_BYTES = 20_000
"""A few steps'."""
_IDENTITY = "crash"


def delta_crash_points(folder: Path, *, steps: int, tries: int, seed: int) -> Crashes:
    """Write the deltas of so many steps, every third one undone and made again; about `tries` folders at each."""
    rng, crashes = np.random.default_rng(seed), Crashes()
    log, image = DeltaLog(folder / "deltas", _KEPT_BYTES), folder / "image"
    log.folder.mkdir(parents=True)
    image.mkdir()
    history: list[Words] = [[rng.integers(0, 1 << 16, size, dtype=np.uint16) for size in _SIZES]]
    for commit in range(1, steps + 1):
        for _ in range(2 if commit % 3 == 0 else 1):
            words, before = _change(history[commit - 1], rng), _files_of(log.folder)
            log.write(_delta(commit, history[commit - 1], words))
            after, name = _files_of(log.folder), log._path(commit).name
            found = [*history[:commit], words]
            for number, (files, torn) in enumerate(_images(before, after, name, tries, rng)):
                _put(image, files)
                whole = files.get(name) == after[name]
                for at in range(commit - 1, commit + 1 if whole or torn else commit):
                    crashes.points += 1
                    crashes.newer += at == commit and whole
                    if wrong := _find_problem(image, files, found, at, torn=torn and not whole):
                        crashes.bad.append(f"delta of step {commit}, seed {seed}, image {number}, at {at}: {wrong}")
        history.append(words)
    return crashes


def _change(words: Words, rng: np.random.Generator) -> Words:
    """A few words in a hundred of each tensor are other ones."""
    return [np.where(rng.random(part.size) < 0.03, part + np.uint16(1), part).astype(np.uint16) for part in words]


def _delta(commit: int, old: Words, new: Words) -> StepDelta:
    marks = [
        TensorMark(f"tensor{index}", one.shape, "bfloat16", zlib.crc32(one.data), zlib.crc32(other.data))
        for index, (one, other) in enumerate(zip(old, new, strict=True))
    ]
    spans = [(0, 0, _CUT), (0, _CUT, _SIZES[0]), (1, 0, _SIZES[1])]
    pieces = [(index, a, delta_of(old[index][a:b], new[index][a:b], ValueFormat.BF16)) for index, a, b in spans]
    return StepDelta(_IDENTITY, commit, commit, tuple(marks), tuple(pieces))


def _files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _images(
    before: Mapping[str, bytes], after: Mapping[str, bytes], name: str, tries: int, rng: np.random.Generator
) -> Iterator[tuple[dict[str, bytes], bool]]:
    """Folders while a delta is written, and whether it is torn under its name, which no drive that flushes leaves."""
    gone, new = sorted(before.keys() - after.keys()), after[name]
    for number in range(tries):
        files = {other: text for other, text in after.items() if other != name}
        files |= {other: before[other] for other in gone if rng.random() < 0.5}
        kind = number % 4
        if kind == 0 and name in before:
            files[name] = before[name]  # of the step that was undone
        elif kind == 1:
            files[f".{name}.part"] = _tear(new, rng)
        elif kind > 1:
            files[name] = new if kind == 2 else _tear(new, rng)
        yield files, kind == 3


def _tear(text: bytes, rng: np.random.Generator) -> bytes:
    """All bytes or the first ones, and zeros in the place of some sectors."""
    torn = bytearray(text if rng.random() < 0.5 else text[: rng.integers(len(text) + 1)])
    for first in range(0, len(torn), SECTOR_BYTES):
        if rng.random() < 0.3:
            torn[first : first + SECTOR_BYTES] = bytes(len(torn[first : first + SECTOR_BYTES]))
    return bytes(torn)


def _put(folder: Path, files: Mapping[str, bytes]) -> None:
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (folder / name).write_bytes(text)


def _find_problem(
    folder: Path, files: Mapping[str, bytes], history: Sequence[Words], at: int, *, torn: bool
) -> str | None:
    """Read what changed since every step. torn: the file of the last step is."""
    log, last = DeltaLog(folder), len(history) - 1
    for since in range(at + 1):
        needed = range(since + 1, at + 1)
        there = all(log._path(step).name in files for step in needed) and not (torn and last in needed)
        try:
            found = log.read(_IDENTITY, at, at, since)
        except (StateError, StreamError) as error:
            if there:
                return f"since {since}: {error}"
            continue
        if not there:
            return f"since {since}: a delta that is not there was read"
        if not _leads(found, history[since], history[at]):
            return f"since {since}: other words than those of the step"
    return None


def _leads(delta: WeightDelta, old: Words, new: Words) -> bool:
    """Whether a delta leads from old words to new ones."""
    words = [part.copy() for part in old]
    for name, changes in delta.changes.items():
        words[int(name.removeprefix("tensor"))][changes.indices] = changes.words
    return all(np.array_equal(one, other) for one, other in zip(words, new, strict=True))
