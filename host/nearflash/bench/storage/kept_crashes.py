"""Crash points of a store whose sequences outlast it: power is lost, it is opened, and each sequence is looked at.

Files are lost as in `kv_crashes`; of the journal what was not synced may be lost from any byte on. In every image each
sequence must hold the beginning of what it once held, as it was appended; and no less than a returned `flush` covered,
unless it was cropped or freed since: all of its tokens, or where there was no room for the last ones its full groups.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import NearflashError, StorageFullError
from nearflash.bench.storage.crashes import apply, images
from nearflash.bench.storage.disk import Disk, Flush, Write
from nearflash.bench.storage.kv_crashes import BUFFER_BYTES, LAYOUT, SHAPE, KvCrashes
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.kv import KvStore
from nearflash.storage.kv.journal import SequenceJournal, journal_path

__all__ = ["kept_crash_points"]

GEOMETRY = FlashGeometry(4096, pages_per_block=8, channels=1, luns=1, blocks=12)
_STORE = "0" * 32

F16 = NDArray[np.float16]


@dataclass(frozen=True)
class _Event:
    what: Write | Flush
    promised: dict[int, int]
    """Tokens of each sequence that must be found."""
    synced: int
    """Bytes of the journal that are on the drive."""
    written: int


def kept_crash_points(path: Path, *, actions: int, tries: int, seed: int) -> KvCrashes:
    """Record a life of so many calls of a kept store at `path`; try about `tries` images at each of its points."""
    disk, crashes = Disk(), KvCrashes()
    life = _Life(path, disk, seed)
    try:
        for _ in range(actions):
            life.act()
    finally:
        crashes.erases = life.close()
    journal = journal_path(path).read_bytes()
    rng = np.random.default_rng(seed)
    durable, pending = np.zeros_like(disk.contents[0]), list[Write]()
    for number, event in enumerate(life.events):
        if isinstance(event.what, Write):
            pending.append(event.what)
        else:
            apply([durable], pending)
            pending = []
        for reached in images(sum(len(write.data) for write in pending) // BLOCK_BYTES, tries, rng):
            disk.contents[0][:] = durable
            apply(disk.contents, pending, reached)
            journal_path(path).write_bytes(journal[: int(rng.integers(event.synced, event.written + 1))])
            crashes.points += 1
            if wrong := _wrong(path, disk, event.promised, life.versions):
                crashes.bad.append(f"kept store, seed {seed}, event {number}, image {crashes.points}: {wrong}")
    path.unlink()
    journal_path(path).unlink()
    return crashes


class _Life:
    """A kept store on a small flash, and what it has promised."""

    def __init__(self, path: Path, disk: Disk, seed: int) -> None:
        self.events: list[_Event] = []
        self.versions: dict[int, list[F16]] = {}
        """K and V (2, heads, tokens, d) that each sequence held; the last one is what it holds now, or held."""
        self._disk, self._rng, self._journal = disk, np.random.default_rng(seed), journal_path(path)
        self._promised: dict[int, int] = {}
        self._synced = self._seen = 0

        class Journal(SequenceJournal):
            """Tells this life what of it is on the drive."""

            def sync(own) -> None:
                super().sync()
                self._note()
                self._synced = own.path.stat().st_size if own.path.exists() else 0

        def create() -> KvStore:
            flash = FileFlash.create(path, GEOMETRY, threads=1, direct=False, backend=disk)
            journal = Journal.create(self._journal, _STORE)
            self._synced = self._journal.stat().st_size
            return KvStore(flash, SHAPE, LAYOUT, buffer_bytes=BUFFER_BYTES, journal=journal)

        self._store: KvStore = self._noted(create)

    def act(self) -> None:
        """One random call."""
        alive = list(self._store.lengths)
        action = self._rng.choice(["add", "append", "append", "append", "append", "fork", "crop", "free", "flush"])
        if action == "add" or not alive:
            number = self._noted(self._store.add)
            self.versions[number] = [np.zeros((2, SHAPE.kv_heads, 0, SHAPE.dim), np.float16)]
            return
        number = int(self._rng.choice(alive))
        if action == "append":
            self._append(number, int(self._rng.integers(1, 50)))
        elif action == "fork":
            child = self._noted(lambda: self._store.fork(number))
            self.versions[child] = [self.versions[number][-1]]
        elif action == "crop":
            length = int(self._rng.integers(self._store.lengths[number] + 1))
            size, promised = LAYOUT.group_tokens, self._promised.get(number, 0)
            self._promised[number] = promised if promised <= length else min(promised // size, length // size) * size
            self.versions[number].append(self.versions[number][-1][:, :, :length])
            self._noted(lambda: self._store.crop(number, length))
        elif action == "flush":
            size = 1
            try:
                self._noted(self._store.flush)
            except StorageFullError:
                size = LAYOUT.group_tokens
            self._promised = {one: tokens // size * size for one, tokens in self._store.lengths.items()}
        elif len(alive) > 1:
            self._free(number)

    def close(self) -> int:
        """How many blocks were erased."""
        erases = int(self._store.statistics.erases.sum())
        with suppress(StorageFullError):
            self._noted(self._store.close)
        return erases

    def _append(self, number: int, tokens: int) -> None:
        size = (2, SHAPE.kv_heads, tokens, SHAPE.dim)
        new = self._rng.standard_normal(size, dtype=np.float32).astype(np.float16)
        before = self.versions[number][-1]
        self.versions[number][-1] = np.concatenate([before, new], axis=2)
        try:
            self._noted(lambda: self._store.append(number, 0, *new))
        except StorageFullError:
            self.versions[number][-1] = before
            self._free(max(self._store.lengths, key=self._store.lengths.__getitem__))

    def _free(self, number: int) -> None:
        self._promised.pop(number, None)
        self._noted(lambda: self._store.free(number))

    def _noted(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        finally:
            self._note()

    def _note(self) -> None:
        """What the flash was told since the last time is events of now."""
        written = self._journal.stat().st_size if self._journal.exists() else 0
        new, self._seen = self._disk.log[self._seen :], len(self._disk.log)
        self.events += [_Event(what, dict(self._promised), self._synced, written) for what in new]


def _wrong(path: Path, disk: Disk, promised: dict[int, int], versions: dict[int, list[F16]]) -> str | None:
    """Open the image; None where every sequence is right, else what is not."""
    journal = None
    try:
        flash = FileFlash.open(path, threads=1, direct=False, backend=disk)
        try:
            if not flash.about:  # its user had not begun
                return None
            journal = SequenceJournal.open(journal_path(path), _STORE)
            store = KvStore(flash, SHAPE, LAYOUT, journal=journal)
            if lost := [one for one, tokens in promised.items() if store.lengths.get(one, 0) < tokens]:
                return f"sequence {lost[0]} has {store.lengths.get(lost[0])} tokens, not {promised[lost[0]]}"
            for number, tokens in store.lengths.items():
                kv, v_mean = _values(store, number, tokens)
                once = [one for one in versions[number] if np.array_equal(one[:, :, :tokens], kv)]
                if not once:
                    return f"sequence {number} holds {tokens} tokens that it never held"
                if not np.array_equal(v_mean, (kv[1].sum(1, dtype=np.float64) / max(tokens, 1)).astype(np.float32)):
                    return f"sequence {number} has another mean of V"
            return None
        finally:
            flash.close()
            if journal is not None:
                journal.close(None)
    except NearflashError as error:
        return str(error) if any(promised.values()) else None
    finally:
        disk.log.clear()


def _values(store: KvStore, number: int, tokens: int) -> tuple[F16, NDArray[np.float32]]:
    """K and V of a sequence as its pages hold them, the last tokens as memory has them; and its mean of V.

    The index pages are read, too.
    """
    at, size = store.layer(number, 0), LAYOUT.group_tokens
    blocks = range(tokens // LAYOUT.block_tokens)
    store.read(at.index_pages.reshape(-1), store.pages.index_keys(at.index_tags, 0, blocks).reshape(-1))
    groups = range(tokens // size)
    pages = at.token_pages[:, : len(groups)].reshape(-1)
    read = store.read(pages, store.pages.token_keys(at.token_tags[: len(groups)], 0, groups).reshape(-1))
    kv = store.pages.values(read.data).reshape(2, SHAPE.kv_heads, -1, SHAPE.dim)
    last = np.stack([at.suffix_k, at.suffix_v])[:, :, at.suffix_k.shape[1] - tokens % size :]
    return np.concatenate([kv, last], axis=2), at.v_mean
