"""Crash points of a block store: power is lost at any moment, the file is opened, and each block is looked at.

A life on a small file that is always nearly full: blocks are put, read, pinned and evicted, the file closed and killed.
A key that was evicted is put again with other content, so that a block of before is told from the one of now. In every
image each block that was reported durable, and not evicted since, must be served as it was put; every other one is a
miss, or what was put last: never another's, nor what an older generation held. Blocks of keys that an image has are put
once more: what that reports durable, though nothing is written, must be served too.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.abi.errors import NearflashError
from nearflash.bench.storage.crashes import replay
from nearflash.bench.storage.disk import Flush, LoggedDisk, Write
from nearflash.storage.blocks.block_file import BlockFile, create_file
from nearflash.storage.blocks.layout import BlockLabel, BlockLayout
from nearflash.storage.blocks.transfer import BlockTransfer
from nearflash.storage.blocks.writer import BlockWriter

__all__ = ["BlockCrashes", "block_crash_points"]

NAMESPACE = "crash"
BLOCK_SIZE = 5000
LAYOUT = BlockLayout(BLOCK_SIZE, segment_slots=6, segments=8)
KEYS = 90
"""About twice as many as fit."""
_COMMITTER = 1
"""Threads of a life: a batch is committed while the next one is written."""
CONTINUED = 16
"""After each so-manieth image the store goes on, and is looked at once more."""

Versions = dict[bytes, int]


@dataclass
class BlockCrashes:
    """How many images were opened, segments erased in the life that they are of, and what was wrong."""

    points: int = 0
    erases: int = 0
    moved: int = 0
    bad: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Event:
    what: Write | Flush
    promised: Versions
    """Of each block that must be found which version."""
    oldest: Versions
    """Of each key the last version that was durable; none before it may be found."""
    newest: Versions
    """Of each key the version that was put last."""


def block_crash_points(path: Path, *, actions: int, tries: int, seed: int) -> BlockCrashes:
    """Record a life of so many calls of a block store at `path`; try about `tries` images at each of its points."""
    disk, crashes = LoggedDisk(), BlockCrashes()
    life = _Life(path, disk, seed)
    for _ in range(actions):
        life.act()
    crashes.erases, crashes.moved = life.close()
    for number in replay(disk, [event.what for event in life.events], tries, seed):
        crashes.points += 1
        with _quiet():
            wrong = _wrong(path, disk, life.events[number], goes_on=crashes.points % CONTINUED == 0)
        if wrong:
            crashes.bad.append(f"block store, seed {seed}, event {number}, image {crashes.points}: {wrong}")
    path.unlink()
    return crashes


@cache
def _content_of(key: bytes, version: int) -> bytes:
    """The bytes of a block, of a length of their own."""
    rng = np.random.default_rng([version, *key])
    return rng.bytes(int(rng.integers(1, BLOCK_SIZE + 1)))


def _open(path: Path, disk: LoggedDisk, threads: int = 0) -> BlockFile:
    return BlockFile.open_existing(path, direct=False, backend=disk, threads=threads)


class _Life:
    """A block store on a small file, and what it has promised."""

    def __init__(self, path: Path, disk: LoggedDisk, seed: int) -> None:
        self.events: list[_Event] = []
        self._path, self._disk, self._rng = path, disk, np.random.default_rng(seed)
        self._promised, self._oldest, self._newest = Versions(), Versions(), Versions()
        self._erases = self._moved = 0
        create_file(path, BlockLabel.create(LAYOUT, NAMESPACE), direct=False, backend=disk)
        self._blocks: BlockFile = self._note(lambda: _open(path, disk, _COMMITTER), since=0)

    def act(self) -> None:
        """One random call."""
        action = self._rng.choice(["put"] * 6 + ["use", "use", "pin", "unpin", "reopen"])
        keys = [bytes([number]) for number in self._rng.choice(KEYS, int(self._rng.integers(1, 7)), replace=False)]
        index = self._blocks.index
        if action == "put":
            self._note(lambda: self._put([key for key in keys if key not in index]))
        elif action == "use":
            for key in keys:
                index.find(key)
        elif action == "pin" and len(index.pins) < index.layout.slots // 4:
            index.pins.update({key: 1 for key in keys if key in index})
        elif action == "unpin":
            index.pins.clear()
        elif action == "reopen":
            self._reopen()

    def close(self) -> tuple[int, int]:
        """Segments erased, and blocks moved."""
        self._moved += self._blocks.statistics.moved
        erases = self._blocks.statistics.erases
        self._note(self._blocks.close)
        return erases, self._moved

    def _reopen(self) -> None:
        self._moved += self._blocks.statistics.moved
        self._blocks.close()
        self._blocks = self._note(lambda: _open(self._path, self._disk, _COMMITTER))

    def _put(self, keys: list[bytes]) -> None:
        transfer = BlockTransfer(len(keys))
        self._newest = self._newest | {key: self._newest.get(key, 0) + 1 for key in keys}
        data = [np.frombuffer(_content_of(key, self._newest[key]), np.uint8) for key in keys]
        blocks = [(transfer, number, key, data[number]) for number, key in enumerate(keys)]
        half = len(blocks) // 2
        for batch in [self._blocks.submit_write(part) for part in (blocks[:half], blocks[half:]) if part]:
            batch.result()

    def _note(self, action: Callable[[], Any], since: int | None = None) -> Any:
        """Add what a call writes as events; what it evicts is promised no more from its beginning on."""
        start = len(self._disk.log) if since is None else since
        result = action()
        index = result.index if isinstance(result, BlockFile) else self._blocks.index
        now = {key: version for key, version in self._newest.items() if key in index}
        promised = {key: version for key, version in self._promised.items() if now.get(key) == version}
        self.events += [_Event(what, promised, self._oldest, self._newest) for what in self._disk.log[start:]]
        self._promised, self._oldest = now, self._oldest | now
        return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Torn blocks are not logged: an image has some."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _wrong(path: Path, disk: LoggedDisk, event: _Event, *, goes_on: bool) -> str | None:
    """Open the image; None where every block is right, else what is not."""
    try:
        with _open(path, disk) as blocks:
            wrong = _find_problem(blocks, event.promised, event.oldest, event.newest)
            if wrong is None and goes_on:
                wrong = _go_on(blocks, event)
        return wrong
    except NearflashError as error:  # of a file that was not flushed yet
        return str(error) if event.oldest else None
    finally:
        disk.log.clear()


def _go_on(blocks: BlockFile, event: _Event) -> str | None:
    """Put blocks of keys that are not there, a segment's worth and more; they are served."""
    keys = [bytes([number]) for number in range(KEYS) if bytes([number]) not in blocks.index]
    newest = event.newest | {key: event.newest.get(key, 0) + 1 for key in keys}
    size = blocks.layout.segment_slots
    for start in range(0, len(keys), size):
        part = keys[start : start + size]
        data = [np.frombuffer(_content_of(key, newest[key]), np.uint8) for key in part]
        blocks.write([(BlockTransfer(1), 0, key, one) for key, one in zip(part, data, strict=True)])
        if wrong := _find_problem(blocks, {key: newest[key] for key in part}, event.oldest, newest):
            return f"going on: {wrong}"
    return None


def _find_problem(blocks: BlockFile, promised: Versions, oldest: Versions, newest: Versions) -> str | None:
    """Look at every block that is there; what is wrong with the first that is, or is missing."""
    reported = _put_again(blocks, newest)
    found = _read_all(blocks)
    for key, content in found.items():
        versions = range(1, newest.get(key, 0) + 1)
        served = next((version for version in versions if content == _content_of(key, version)), None)
        if served is None or served < oldest.get(key, 0):
            return f"block {key.hex()} must be one that was put, from version {oldest.get(key, 0)} on, not {served}"
        if promised.get(key, served) != served:
            return f"block {key.hex()} must have version {promised[key]}, not {served}"
    if missing := promised.keys() - found.keys():
        return f"{len(missing)} of {len(promised)} durable blocks are lost: {min(missing).hex()}"
    if missing := reported - found.keys():
        return f"{len(missing)} of {len(reported)} blocks put again, reported durable, are lost: {min(missing).hex()}"
    return None


def _put_again(blocks: BlockFile, newest: Versions) -> set[bytes]:
    """Put a block of each key that is there; the keys that were reported durable."""
    keys = blocks.index.keys()
    transfer, writer = BlockTransfer(len(keys)), BlockWriter(blocks, len(keys) * BLOCK_SIZE)
    data = [np.frombuffer(_content_of(key, newest.get(key, 1)), np.uint8) for key in keys]
    writer.submit([(transfer, number, key, data[number]) for number, key in enumerate(keys)])
    writer.close()
    return {key for key, durable in zip(keys, transfer.result(), strict=True) if durable}


def _read_all(blocks: BlockFile) -> dict[bytes, bytes]:
    """The blocks that are served."""
    keys = blocks.index.keys()
    targets = [np.empty(blocks.index.length(key), np.uint8) for key in keys]
    transfer = BlockTransfer(len(keys))
    blocks.submit_read(transfer, [(number, key, targets[number]) for number, key in enumerate(keys)])
    good = transfer.result()
    return {key: target.tobytes() for key, target, served in zip(keys, targets, good, strict=True) if served}
