"""Crash points of a KV store: whatever a returned `flush` covered is there after power was lost, moved or not.

The images are those of `crashes`. In each of them every page that was promised must be found: with its key, a right
CRC32C and the bytes that were programmed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import StateError, StorageFullError
from nearflash.bench.storage.crashes import replay
from nearflash.bench.storage.disk import Flush, LoggedDisk, Write
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry, PageNumbers
from nearflash.storage.flash.page import PageKeys, PageWrites
from nearflash.storage.kv import KvLayout, KvShape, KvStore

__all__ = ["KvCrashes", "kv_crash_points"]

GEOMETRY = FlashGeometry(4096, pages_per_block=8, channels=1, luns=1, blocks=8)
SHAPE = KvShape(layers=1, kv_heads=2, dim=32)
LAYOUT = KvLayout(16, interleaved=True, block_tokens=32, index_format=IndexFormat.INT4, page_bytes=4096)
BUFFER_BYTES = 4 * 4096

Key = tuple[int, ...]
"""Sequence, layer, head, index, kind."""


@dataclass
class KvCrashes:
    """How many images were opened, blocks erased in the life that they are of, and what was lost."""

    points: int = 0
    erases: int = 0
    bad: list[str] = field(default_factory=list)


def kv_crash_points(path: Path, *, actions: int, tries: int, seed: int) -> KvCrashes:
    """Record a life of so many calls of a KV store at `path`; try about `tries` images at each of its points."""
    disk, crashes = LoggedDisk(), KvCrashes()
    life = _Life(path, disk, seed)
    for _ in range(actions):
        life.act()
    crashes.erases = life.close()
    for number in replay(disk, [what for what, _ in life.events], tries, seed):
        crashes.points += 1
        if wrong := _wrong(path, disk, life.events[number][1], life.contents):
            crashes.bad.append(f"KV store, seed {seed}, event {number}, image {crashes.points}: {wrong}")
    path.unlink()
    return crashes


class _Life:
    """A KV store on a small flash, which is always nearly full, and what it has promised."""

    def __init__(self, path: Path, disk: LoggedDisk, seed: int) -> None:
        self.events: list[tuple[Write | Flush, frozenset[Key]]] = []
        """What reached the log, and the pages that must be found from then on."""
        self.contents: dict[Key, bytes] = {}
        self._disk, self._rng, self._promised = disk, np.random.default_rng(seed), frozenset[Key]()
        self._tokens: dict[int, int] = {}
        contents = self.contents

        class Recorded(FileFlash):
            def program(self, pages: PageNumbers, batch: PageWrites) -> None:
                contents.update(zip(_keys(batch.keys), (row.tobytes() for row in batch.data), strict=True))
                super().program(pages, batch)

        def create() -> KvStore:
            flash = Recorded.create(path, GEOMETRY, threads=1, direct=False, backend=disk)
            return KvStore(flash, SHAPE, LAYOUT, buffer_bytes=BUFFER_BYTES)

        self._store: KvStore = self._note(create)

    def act(self) -> None:
        """One random call."""
        action = self._rng.choice(["add", "append", "append", "append", "free", "flush", "flush"])
        if action == "flush":
            self._note(self._store.flush)
            self._promised = frozenset(key for number in self._tokens for key in self._list_pages(number))
        elif action == "free" and len(self._tokens) > 1:
            self._free(int(self._rng.choice(list(self._tokens))))
        elif action == "add" or not self._tokens:
            self._tokens[self._store.add()] = 0
        else:
            self._append(int(self._rng.choice(list(self._tokens))), int(self._rng.integers(1, 60)))

    def close(self) -> int:
        """How many blocks were erased."""
        erases = int(self._store.statistics.erases.sum())
        self._note(self._store.close)
        return erases

    def _append(self, number: int, tokens: int) -> None:
        size = (2, SHAPE.kv_heads, tokens, SHAPE.dim)
        k, v = self._rng.standard_normal(size, dtype=np.float32).astype(np.float16)
        try:
            self._note(lambda: self._store.append(number, 0, k, v))
            self._tokens[number] += tokens
        except StorageFullError:
            self._free(max(self._tokens, key=self._tokens.__getitem__))

    def _free(self, number: int) -> None:
        del self._tokens[number]
        self._promised = frozenset(key for key in self._promised if key[0] != number)
        self._note(lambda: self._store.free(number))

    def _list_pages(self, number: int) -> list[Key]:
        """Pages of whole groups and index blocks."""
        groups = range(self._tokens[number] // LAYOUT.group_tokens)
        blocks = range(self._tokens[number] // LAYOUT.block_tokens)
        pages = self._store.pages
        return [*_keys(pages.token_keys(number, 0, groups)), *_keys(pages.index_keys(number, 0, blocks))]

    def _note(self, action: Callable[[], Any]) -> Any:
        start = len(self._disk.log)
        try:
            return action()
        finally:
            self.events += [(what, self._promised) for what in self._disk.log[start:]]


def _keys(keys: PageKeys) -> Iterable[Key]:
    names = ("sequence", "layer", "head", "index", "kind")
    return zip(*(keys[name].reshape(-1).tolist() for name in names), strict=True)


def _wrong(path: Path, disk: LoggedDisk, promised: frozenset[Key], contents: dict[Key, bytes]) -> str | None:
    """Open the image; None where all that was promised is there, else what is not."""
    try:
        with FileFlash.open(path, threads=1, direct=False, backend=disk) as flash:
            pages = np.arange(GEOMETRY.pages)
            keys, known, erased = flash.headers(pages)
            pages, keys = pages[known & ~erased], keys[known & ~erased]
            valid = flash.valid(pages, keys)
            pages_found: dict[Key, NDArray[np.uint8]] = {}
            for key, page in zip(_keys(keys[valid]), pages[valid].tolist(), strict=True):
                pages_found[key] = disk.contents[0][flash.offset(page) :][: GEOMETRY.page_bytes]
    except StateError as error:  # of a flash that was not flushed yet
        return str(error) if promised else None
    finally:
        disk.log.clear()
    lost = [key for key in promised if key not in pages_found or pages_found[key].tobytes() != contents[key]]
    return f"{len(lost)} of {len(promised)} pages that were flushed are lost: {min(lost)}" if lost else None
