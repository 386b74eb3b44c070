"""Crash points: every image that a drive may hold after power was lost, opened and compared with what was committed.

Of the writes since a file's last flush any may have reached the drive, block by block, in any order, and some blocks
in part (sectors of 512 bytes). Where few blocks are pending all subsets of them are tried, else random ones.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import LostStepWarning, StateError
from nearflash.bench.storage.disk import Flush, LoggedDisk, Write
from nearflash.bench.storage.history import MANIFEST, Event, Oracle, Version, record
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.state.manifest import Manifest
from nearflash.storage.state.state_store import StateStore

__all__ = ["Crashes", "apply", "crash_points", "images", "replay", "try_images"]

SECTOR_BYTES = 512
SECTORS = BLOCK_BYTES // SECTOR_BYTES
EXHAUSTIVE_BLOCKS = 8
"""Up to so many pending blocks every subset is tried."""
CONTINUED = 16
"""One in so many recovered images makes another step and is opened again."""


@dataclass
class Crashes:
    """How many images were opened, and what was wrong with those that did not recover."""

    points: int = 0
    newer: int = 0
    """Images found at the version whose commit (or rollback) was in flight."""
    bad: list[str] = field(default_factory=list)


Check = Callable[[Sequence[Version], Crashes], str | None]
"""Opens the image that is in the files; what is wrong with it, where it may be at these versions."""


def crash_points(
    folder: Path, *, files: int, steps: int, tries: int, seed: int, manifest: Manifest = MANIFEST
) -> Crashes:
    """Record a history of a state of so many files in `folder`; try about `tries` images at each of its points."""
    paths, disk = [folder / f"state-{index}" for index in range(files)], LoggedDisk()
    oracle = Oracle(manifest)
    events = record(paths, disk, oracle, steps)
    arrays = ", ".join(array.name for array in manifest.stored)
    crashes = try_images(disk, events, tries, seed, lambda *given: _wrong(paths, disk, oracle, *given))
    crashes.bad = [f"{files} files of {arrays}, seed {seed}, {wrong}" for wrong in crashes.bad]
    return crashes


def try_images(disk: LoggedDisk, events: Sequence[Event], tries: int, seed: int, check: Check) -> Crashes:
    """Check about `tries` images at each event."""
    crashes = Crashes()
    for number in replay(disk, [event.what for event in events], tries, seed):
        crashes.points += 1
        if wrong := check(events[number].versions, crashes):
            crashes.bad.append(f"event {number}, image {crashes.points}: {wrong}")
    return crashes


def replay(disk: LoggedDisk, events: Iterable[Write | Flush | None], tries: int, seed: int) -> Iterator[int]:
    """Put about `tries` images of each event into the disk's files, one after another; yields the event's number."""
    rng = np.random.default_rng(seed)
    durable = [np.zeros_like(content) for content in disk.contents]
    pending: list[Write] = []
    for number, event in enumerate(events):
        if isinstance(event, Write):
            pending.append(event)
        elif isinstance(event, Flush):
            apply(durable, [write for write in pending if write.file == event.file])
            pending = [write for write in pending if write.file != event.file]
        for reached in images(sum(len(write.data) for write in pending) // BLOCK_BYTES, tries, rng):
            for content, base in zip(disk.contents, durable, strict=True):
                content[:] = base
            apply(disk.contents, pending, reached)
            yield number


def apply(
    contents: Sequence[NDArray[np.uint8]], writes: Sequence[Write], reached: NDArray[np.bool_] | None = None
) -> None:
    """Put the writes into the files; with `reached` (blocks of all writes, 8) only those sectors."""
    first = 0
    for write in writes:
        target = contents[write.file][write.offset : write.offset + len(write.data)].reshape(-1, SECTORS, SECTOR_BYTES)
        chosen = slice(None) if reached is None else reached[first : first + len(target)]
        target[chosen] = write.data.reshape(target.shape)[chosen]
        first += len(target)


def images(blocks: int, count: int, rng: np.random.Generator) -> Iterator[NDArray[np.bool_]]:
    """Which sectors of so many pending blocks reached the drive, (blocks, 8): about `count` choices."""
    if blocks <= EXHAUSTIVE_BLOCKS:
        subsets = [np.array(chosen, bool) for chosen in product((False, True), repeat=blocks)]
    else:
        in_order = [np.arange(blocks) < number for number in range(blocks + 1)]
        subsets = in_order + [rng.random(blocks) < share for share in rng.random(count // 2)]
    for subset in subsets:
        yield np.repeat(subset[:, None], SECTORS, axis=1)
    for index in range(count - len(subsets) if blocks else 0):
        torn = np.repeat(subsets[index % len(subsets)][:, None], SECTORS, axis=1)
        torn[rng.integers(blocks)] = rng.random(SECTORS) < 0.5
        yield torn


def _wrong(
    paths: Sequence[Path], disk: LoggedDisk, oracle: Oracle, versions: Sequence[Version], crashes: Crashes
) -> str | None:
    """Open the image; None where it is exactly at one of the versions, else what is wrong."""
    expected = versions or [(0, 0)]
    try:
        warnings.simplefilter("ignore", LostStepWarning)  # of superblocks that are torn
        with StateStore.open(paths, direct=False, backend=disk) as store:
            version = oracle.find_version(store, expected)
            if version is None:
                return f"at step {store.steps}, not exactly at one of {expected}"
            crashes.newer += len(versions) > 1 and version == versions[-1]
            if crashes.points % CONTINUED:
                return None
            following = version[0] + 1, 2
            oracle.write(store, following)
            oracle.commit(store, following)
        with StateStore.open(paths, direct=False, backend=disk) as store:
            return None if oracle.is_at(store, following) else f"the step after {version} went wrong"
    except StateError as error:
        # A state whose creation was interrupted may be refused.
        return str(error) if versions else None
    finally:
        disk.log.clear()
