"""Crash points of a store whose sequences outlast it: power is lost, it is opened, and each sequence is looked at.

A life is that of sessions: turns (what is shared stays, the rest is cut off; a note states the tokens to come; they
are appended, and those of a reply after them; a note of all, a flush), turns that break off, forks, and new openings
after a close or a kill. Files are lost as in `kv_crashes`; of the journal what was not synced may be lost from any byte
on.

In every image a sequence must have exactly K and V of the tokens that its surviving note states, as far as it has any:
not those that another note stated. And no less than a returned `flush` covered, unless it was cropped or freed since:
all tokens and the note of then, or where there was no room for the last ones its full groups.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import NearflashError, StorageFullError
from nearflash.bench.storage.crashes import apply, images
from nearflash.bench.storage.disk import Flush, LoggedDisk, Write
from nearflash.bench.storage.kv_crashes import BUFFER_BYTES, LAYOUT
from nearflash.storage.flash.file import KEPT, FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.kv import KvShape, KvStore
from nearflash.storage.kv.journal import SequenceJournal, journal_path

__all__ = ["KeptCrashes", "find_kept_crash_points", "find_mixed"]

SHAPE = KvShape(layers=2, kv_heads=1, dim=32)
GEOMETRY = FlashGeometry(4096, pages_per_block=8, channels=1, luns=1, blocks=12)
CONTINUED = 8
"""After each so-manieth image the store goes on, and is looked at once more."""

F16 = NDArray[np.float16]


@dataclass
class KeptCrashes:
    """Images of which the journal alone lost something, others, those of them that went on, and what was wrong."""

    journal_images: int
    page_images: int
    continued: int
    bad: list[str]


@dataclass(frozen=True)
class _Event:
    what: Write | Flush | None
    """None: a line of the journal."""
    promised: dict[int, tuple[int, int]]
    """Tokens of each sequence that must be found, and the first version that its note may state."""
    journal: int
    """Which of the life's journals was there."""
    synced: int
    """Bytes of it that are on the drive."""
    written: int


def find_kept_crash_points(path: Path, *, actions: int, tries: int, seed: int, ahead: bool = True) -> KeptCrashes:
    """Record a life of so many calls of a kept store at `path`; at each of its points try every line of the journal
    that may be the last, and about `tries` images of pages (0: none).

    ahead=False: the control. Pages are programmed without waiting for the journal, which must show.
    """
    disk, crashes = LoggedDisk(), KeptCrashes(0, 0, 0, [])
    life = _Life(path, disk, seed, ahead)
    for _ in range(actions):
        life.act()
    life.close()
    rng = np.random.default_rng(seed)
    durable, pending = np.zeros_like(disk.contents[0]), list[Write]()
    for number, event in enumerate(life.events):
        if isinstance(event.what, Write):
            pending.append(event.what)
        elif event.what is not None:
            apply([durable], pending)
            pending = []
        for kind, reached, journal in _images(life.journals[event.journal], event, pending, tries, rng):
            disk.contents[0][:] = durable
            apply(disk.contents, pending, reached)
            journal_path(path).write_bytes(journal)
            crashes.journal_images += kind == "journal"
            crashes.page_images += kind == "pages"
            image = crashes.journal_images + crashes.page_images
            if wrong := _wrong(path, disk, event.promised, life.versions, rng, image % CONTINUED == 0):
                crashes.bad.append(f"kept store, seed {seed}, event {number}, {kind} image {image}: {wrong}")
            crashes.continued += image % CONTINUED == 0
    path.unlink()
    journal_path(path).unlink()
    return crashes


def _images(
    journal: bytes, event: _Event, pending: list[Write], tries: int, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[np.bool_] | None, bytes]]:
    """Kind, which sectors of the pending writes reached the drive (None: all), and the journal."""
    ends = [end + 1 for end in range(event.synced, event.written) if journal[end : end + 1] == b"\n"]
    torn = rng.integers(event.synced, event.written + 1, min(len(ends), 2)).tolist()
    for end in [event.synced, *ends, *torn]:
        yield "journal", None, journal[:end]
    for reached in (
        ()
        if event.what is None or not tries
        else images(sum(len(write.data) for write in pending) // BLOCK_BYTES, tries, rng)
    ):
        yield "pages", reached, journal[: int(rng.integers(event.synced, event.written + 1))]


def _open_store(path: Path, disk: LoggedDisk, journal: type[SequenceJournal], new_store: str = "") -> KvStore:
    flash = FileFlash.open(path, threads=1, direct=False, backend=disk)
    try:
        opened = journal.open(journal_path(path), flash.about[KEPT], new_store)
        return KvStore(flash, SHAPE, LAYOUT, buffer_bytes=BUFFER_BYTES, journal=opened)
    except BaseException:
        flash.close()
        raise


class _Life:
    """A kept store on a small flash, and what it has promised."""

    def __init__(self, path: Path, disk: LoggedDisk, seed: int, ahead: bool) -> None:
        self.events: list[_Event] = []
        self.journals: list[bytes] = []
        """The whole of each, one after the other: a new one at each opening."""
        self.versions: list[F16] = []
        """K and V (2, layers, tokens, d) that notes state."""
        self._path, self._disk, self._ahead = path, disk, ahead
        self._rng = np.random.default_rng(seed)
        self._promised: dict[int, tuple[int, int]] = {}
        self._synced = self._seen = 0
        self._journal = self._make_journal()
        flash = FileFlash.create(path, GEOMETRY, threads=1, direct=False, backend=disk)
        journal = self._journal.create(journal_path(path), self._name())
        self._began(KvStore(flash, SHAPE, LAYOUT, buffer_bytes=BUFFER_BYTES, journal=journal))

    def act(self) -> None:
        """One random call, or the calls of a turn."""
        alive = list(self._store.lengths)
        action = self._rng.choice(["turn"] * 7 + ["add", "fork", "free", "close", "kill"])
        try:
            if action == "add" or not alive:
                self._note(self._store.add(), np.zeros((2, SHAPE.layers, 0, SHAPE.dim), np.float16))
            elif action == "turn":
                self._turn(int(self._rng.choice(alive)))
            elif action == "fork":
                self._fork(int(self._rng.choice(alive)))
            elif action == "free" and len(alive) > 1:
                self._free(int(self._rng.choice(alive)))
            elif action in ("close", "kill"):
                self._reopen(action == "kill")
        except StorageFullError:
            self._free(max(self._store.lengths, key=self._store.lengths.__getitem__))
        self.record()

    def close(self) -> None:
        """The end."""
        with suppress(StorageFullError):
            self._store.close()
        self.record()

    def record(self) -> None:
        """Make what the flash was given since the last time events of now."""
        for what in self._disk.log[self._seen :]:
            self._add(what)
        self._seen = len(self._disk.log)

    def _add(self, what: Write | Flush | None) -> None:
        journal = len(self.journals) - 1
        written = len(self.journals[journal]) if self.journals else 0
        self.events.append(_Event(what, dict(self._promised), max(journal, 0), self._synced, written))

    def _turn(self, number: int) -> None:
        """As a session's: reuse, note, append, reply, note, flush. It may break off anywhere."""
        before = self._kv_of_note(number)
        stored = min(self._store.lengths[number], before.shape[2])
        shared = stored if self._rng.random() < 0.4 else int(self._rng.integers(stored + 1))
        prompt = np.concatenate([before[:, :, :shared], self._draw(int(self._rng.integers(1, 50)))], axis=2)
        self._crop(number, shared)
        self._note(number, prompt)
        whole = np.concatenate([prompt, self._draw(int(self._rng.integers(0, 20)))], axis=2)
        breaks_off = self._rng.random() < 0.3
        at = shared
        while at < whole.shape[2]:
            end = min(at + int(self._rng.choice([1, 7, 30])), whole.shape[2])
            for layer in range(SHAPE.layers):
                self._store.append(number, layer, *whole[:, layer, None, at:end])
                if breaks_off and self._rng.random() < 0.2:
                    return
            at = end
        self._note(number, whole)
        if self._rng.random() < 0.7:
            self._flush()

    def _crop(self, number: int, length: int) -> None:
        size = LAYOUT.group_tokens
        tokens, version = self._promised.get(number, (0, -1))
        self._promised[number] = tokens if tokens <= length else min(tokens, length) // size * size, version
        self._store.crop(number, length)

    def _flush(self) -> None:
        size = 1
        try:
            self._store.flush()
        except StorageFullError:
            size = LAYOUT.group_tokens
        self.record()
        for number, tokens in self._store.lengths.items():
            ends = {self._store.layer(number, layer).tokens for layer in range(SHAPE.layers)}
            whole = LAYOUT.group_tokens if len(ends) > 1 else size  # of a turn that broke off between layers
            self._promised[number] = tokens // whole * whole, self._store.notes[number]["version"]

    def _fork(self, number: int) -> None:
        self._crop(number, min(self._store.lengths[number], self._kv_of_note(number).shape[2]))
        child = self._store.fork(number)
        self._store.note(child, self._store.notes[number])

    def _free(self, number: int) -> None:
        self._promised.pop(number, None)
        self._store.free(number)

    def _reopen(self, killed: bool) -> None:
        """The file as its user left it: power is not lost now, but what was not flushed may be lost later."""
        if killed:
            self._store._pool.stage._writes.was_raised = True  # nothing more is programmed
            self._store.flash.close()
            assert self._store._journal is not None, "of a kept store"
            self._store._journal.close(None)
        else:
            with suppress(StorageFullError):
                self._store.close()
        self.record()
        self._began(_open_store(self._path, self._disk, self._journal, self._name()))
        for number in set(self._store.lengths) - set(self._list_noted()):
            self._free(number)

    def _began(self, store: KvStore) -> None:
        self._store = store
        if not self._ahead:
            store._pool.stage._ahead = lambda: None
        self.record()

    def _list_noted(self) -> list[int]:
        return [number for number, info in self._store.notes.items() if info]

    def _kv_of_note(self, number: int) -> F16:
        return self.versions[self._store.notes[number]["version"]]

    def _note(self, number: int, kv: F16) -> None:
        self.versions.append(kv)
        self._store.note(number, {"version": len(self.versions) - 1})

    def _draw(self, tokens: int) -> F16:
        return _draw(self._rng, tokens)

    def _name(self) -> str:
        return self._rng.bytes(16).hex()

    def _make_journal(self) -> type[SequenceJournal]:
        """A journal that has this life know what of it is written, and what is on the drive."""
        life = self

        def before(call: Callable[..., Any]) -> Callable[..., Any]:
            def record_first(own: SequenceJournal, *arguments: Any) -> Any:
                life.record()  # what came before is of the journal of before
                return call(own, *arguments)

            return record_first

        class Journal(SequenceJournal):
            @before
            def _put(own, body: Any) -> None:
                super()._put(body)
                if own._out is not None:
                    life.journals[-1] = own.path.read_bytes()
                    life._add(None)

            @before
            def sync(own) -> None:
                super().sync()
                life._synced = own._synced

            @before
            def _rewrite(own) -> None:
                super()._rewrite()
                life.journals.append(own.path.read_bytes())
                life._synced = own._synced

        return Journal


class _Journal(SequenceJournal):
    """The journal of an image: nothing is lost after that."""

    def sync(self) -> None:
        """Nothing to wait for."""


def _wrong(
    path: Path, disk: LoggedDisk, promised: dict[int, tuple[int, int]], versions: list[F16], rng: np.random.Generator,
    goes_on: bool,
) -> str | None:  # fmt: skip
    """Open the image; None where every sequence is right, else what is not."""
    try:
        with FileFlash.open(path, threads=1, direct=False, backend=disk) as flash:
            if not flash.about:  # its user had not begun
                return None
        with _inspect(path, disk) as store:
            for number, (tokens, version) in promised.items():
                tokens_found, stated = store.lengths.get(number, 0), store.notes.get(number, {}).get("version", -1)
                if tokens_found < tokens or stated < version:
                    return f"sequence {number} has {tokens_found} tokens of note {stated}, not {tokens} of {version}"
            noted = {number: versions[info["version"]] for number, info in store.notes.items() if info}
            wrong = find_mixed(store, noted)
            if wrong is None and goes_on:
                _go_on(store, noted, rng)
        if wrong is None and goes_on:
            with _inspect(path, disk) as store:
                wrong = find_mixed(store, noted)
        return wrong
    except NearflashError as error:
        return f"{type(error).__name__}: {error}" if any(tokens for tokens, _ in promised.values()) else None
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        return f"an error without a name: {error!r}"
    finally:
        disk.log.clear()


@contextmanager
def _inspect(path: Path, disk: LoggedDisk) -> Iterator[KvStore]:
    """The store of an image, which may have no room for the last tokens when it is closed."""
    store = _open_store(path, disk, _Journal)
    try:
        yield store
    finally:
        with suppress(StorageFullError):
            store.close()


def _go_on(store: KvStore, noted: dict[int, F16], rng: np.random.Generator) -> None:
    """A turn of every sequence, as far as there is room; `noted` is what is stated then."""
    for number, before in list(noted.items()):
        shared = int(rng.integers(min(store.lengths[number], before.shape[2]) + 1))
        store.crop(number, shared)
        noted[number] = np.concatenate([before[:, :, :shared], _draw(rng, int(rng.integers(1, 40)))], axis=2)
        store.note(number, {"version": -1})
        with suppress(StorageFullError):
            for layer in range(SHAPE.layers):
                store.append(number, layer, *noted[number][:, layer, None, shared:])


def _draw(rng: np.random.Generator, tokens: int) -> F16:
    """K and V of new tokens."""
    return rng.standard_normal((2, SHAPE.layers, tokens, SHAPE.dim), dtype=np.float32).astype(np.float16)


def find_mixed(store: KvStore, stated: dict[int, F16]) -> str | None:
    """Name the first sequence that has other K and V than its note states, and how; None: there is none."""
    for number, want in stated.items():
        tokens = store.lengths[number]
        served = min(tokens, want.shape[2])
        for layer in range(SHAPE.layers):
            kv, v_mean = _values(store, number, layer, tokens)
            same = (kv[:, 0, :served] == want[:, layer, :served]).all(axis=(0, 2))
            if not same.all():
                return f"sequence {number} has {int((~same).sum())} of {served} tokens that its note does not state"
            mean = (kv[1].sum(1, dtype=np.float64) / max(tokens, 1)).astype(np.float32)
            if tokens == store.layer(number, layer).tokens and not np.array_equal(v_mean, mean):
                return f"sequence {number} has another mean of V"
    return None


def _values(store: KvStore, number: int, layer: int, tokens: int) -> tuple[F16, NDArray[np.float32]]:
    """K and V of a sequence as its pages hold them, the last tokens as memory has them; and its mean of V.

    The index pages are read, too.
    """
    at, size = store.layer(number, layer), LAYOUT.group_tokens
    blocks = range(tokens // LAYOUT.block_tokens)
    block_pages = store.pages.index_layout.pages
    index = at.index_pages[:, : len(blocks) * block_pages]
    store.read(index.reshape(-1), store.pages.index_keys(at.index_tags[: len(blocks)], layer, blocks).reshape(-1))
    groups = range(tokens // size)
    pages = at.token_pages[:, : len(groups)].reshape(-1)
    read = store.read(pages, store.pages.token_keys(at.token_tags[: len(groups)], layer, groups).reshape(-1))
    kv = store.pages.values(read.data).reshape(2, SHAPE.kv_heads, -1, SHAPE.dim)
    last = np.stack([at.suffix_k, at.suffix_v])[:, :, len(groups) * size - at.flash_tokens :]
    return np.concatenate([kv, last], axis=2)[:, :, :tokens], at.v_mean
