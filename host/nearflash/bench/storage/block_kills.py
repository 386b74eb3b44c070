"""Kills of a process that stores blocks: what it was told is durable is there, and nothing else is served for it.

The child puts blocks, each of a content that follows from its key, and prints the number of the last one that was
reported durable; it is killed at a random moment, and the file is opened. Blocks are used in the order of their writes,
so that the newest ones, half of the store, cannot have been evicted.
"""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.blocks import BlockStore

__all__ = ["BlockKills", "kill_writers"]

BLOCK_BYTES, CAPACITY_BYTES, NAMESPACE = 20_000, 16 << 20, "kills"
AT_ONCE = 7
"""Blocks of a put."""
MOST_S = 0.25
"""Until a child is killed, after it has stored its first blocks."""


@dataclass
class BlockKills:
    """Kills, blocks that were served after them, those that had to be, and what was wrong."""

    kills: int = 0
    served: int = 0
    durable: int = 0
    bad: list[str] = field(default_factory=list)


def kill_writers(path: Path, *, kills: int, seed: int) -> BlockKills:
    """Kill so many writers of one file, each of which goes on behind what the one before was told."""
    rng, found, acknowledged = np.random.default_rng(seed), BlockKills(), -1
    for _ in range(kills):
        acknowledged = _kill_writer(path, acknowledged + 1, float(rng.random()) * MOST_S)
        found.kills += 1
        _look(path, acknowledged, found)
    return found


def _kill_writer(path: Path, first: int, after_s: float) -> int:
    """The last block of which the writer knew that it is durable."""
    command = [sys.executable, "-m", "nearflash.bench.storage.block_kills", str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None, "a pipe"
        last = writer.stdout.readline()
        time.sleep(after_s)
        writer.kill()
        *lines, _ = writer.stdout.read().split("\n")
    return int([last, *lines][-1])


def _look(path: Path, acknowledged: int, found: BlockKills) -> None:
    """Read what is there: it must be what its key says, and the newest that were acknowledged must be."""
    with _open(path) as store:
        safe = acknowledged - store.stats().capacity_blocks // 2
        numbers = range(max(safe - 200, 0), acknowledged + 5 * AT_ONCE)
        targets = [np.zeros(BLOCK_BYTES, np.uint8) for _ in numbers]
        hits = store.get([_key(number) for number in numbers], targets)
    for number, target, hit in zip(numbers, targets, hits, strict=True):
        found.durable += safe < number <= acknowledged
        found.served += hit
        if hit and not np.array_equal(target, _content(number)):
            found.bad.append(f"kill {found.kills}: block {number} has other bytes than were put")
        if not hit and safe < number <= acknowledged:
            found.bad.append(f"kill {found.kills}: block {number} is lost; {acknowledged} was reported durable")


def _open(path: Path) -> BlockStore:
    return BlockStore(path, CAPACITY_BYTES, BLOCK_BYTES, NAMESPACE, direct=False)


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _content(number: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(number).bytes(BLOCK_BYTES), np.uint8)


def _write(path: Path, first: int) -> None:
    """Put blocks until somebody ends it."""
    with _open(path) as store:
        while True:
            numbers = range(first, first + AT_ONCE)
            if all(store.put([_key(number) for number in numbers], [_content(number) for number in numbers])):
                print(numbers[-1], flush=True)
            first += AT_ONCE


if __name__ == "__main__":
    _write(Path(sys.argv[1]), int(sys.argv[2]))
