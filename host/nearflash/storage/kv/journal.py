"""The journal of a store's sequences, in a file beside that of their pages: what makes pages a sequence again.

One line for each change: CRC-32 as 8 hexadecimal digits, a space, JSON. Of each sequence the last line of a kind
counts, so that the file's beginning alone is a state, too: an older one. A last line that is torn is dropped. Tags that
come after what was noted of a sequence, with no note behind them, do not count: the note is of the pages before.

    store    {"version", "store", "previous"}: that the flash's label names now, or named before; the first line
    begun    {"begun"}: the label names "store"; before this line it may still name "previous"
    tags     {"sequence", "token_tags", "index_tags"}: numbers that its pages go by, [first group or block, number]
    info     {"sequence", "info"}: what its user notes of it
    partial  {"sequence", "partial"}: [tokens, number] of the partial group at its end; []: none
    freed    {"sequence", "freed"}
    closed   {"closed": {sequence: [tokens, sums of V]}}: all pages were programmed; the last line, else it says nothing

The store has a new name at each opening for writing: files that went on from copies of one store are never mixed. A
line's checksum covers the store's name and where the line begins, before the JSON.

The journal goes ahead of the pages: no page is programmed, and no block erased, before `sync` has returned.
"""

import base64
import errno
import json
import os
import threading
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.kv.sequence import Tags
from nearflash.support.files import open_regular, replace_file
from nearflash.support.tables import check_fields, check_integers

__all__ = ["JournalEntry", "SequenceJournal", "journal_line", "journal_path"]

_VERSION, _VERSIONS = 3, (1, 2, 3)
"""Written, and read: version 1 has none of "partial"; 2 no names of before, and checksums of the JSON alone."""
_NAMED = 3
"""The first version whose lines are of one store, and one place."""
Sums = Mapping[int, tuple[int, NDArray[np.float64]]]
"""Tokens, and sums of their V, flat, by sequence."""


def journal_path(flash: Path) -> Path:
    """The path of the journal of a flash in a file: beside the file itself, where `flash` is a link to it."""
    file = flash.resolve()
    return file.with_name(f"{file.name}.sequences")


def journal_line(body: Any, store: str, start: int) -> bytes:
    """The line of a JSON value that begins at byte `start` of a journal."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(text, _seed(store, start)), text)


def _seed(store: str, start: int) -> int:
    """The seed of a line's checksum; the first one names the store itself."""
    return zlib.crc32(f"{store} {start}".encode("utf-8", "backslashreplace")) if start else 0


@dataclass(frozen=True)
class JournalEntry:
    """One sequence."""

    token_tags: Tags
    index_tags: Tags
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    partial: tuple[int, int] | None = None
    """The sequence's tokens, and the number that pages of the last ones go by."""
    noted: "JournalEntry | None" = None
    """As it was when `info` was noted, where other tags have come since."""


class SequenceJournal:
    """A journal (mode 0600). The lock of the flash that it belongs to is its own, too.

    Use `create` or `open`. Raises StateError where the file cannot be written; once something that was noted may be
    lost, every later call does. `sync` may be called from another thread.
    """

    def __init__(self, path: Path, store: str) -> None:
        """Not for callers."""
        self.path, self.store = path, store
        self.entries: dict[int, JournalEntry] = {}
        self.sums: Sums | None = None
        """Where the store was closed: whole groups' tokens and sums of V, flat, by sequence; None after a crash."""
        self._previous = ""
        self._out: BinaryIO | None = None
        self._is_found = False
        """Opened, and not begun: what is noted is written by `begin`."""
        self._end = self._synced = 0
        """Bytes of the file, and those of them that are durable."""
        self._error: OSError | None = None
        self._syncing = threading.Lock()

    @classmethod
    def create(cls, path: Path, store: str) -> Self:
        """An empty journal, begun. Raises StateError as `check_replaceable` does."""
        cls.check_replaceable(path)
        journal = cls(path, store)
        journal._rewrite()
        return journal

    @classmethod
    def check_replaceable(cls, path: Path) -> None:
        """Raise StateError where a file is there that is no journal, or one with sequences: the pages may come back."""
        if not os.path.lexists(path):
            return
        journal = cls(path, "")
        if journal._content():
            journal._load()
        if journal.entries:
            raise StateError(
                f"{path} must not hold sequences where their pages are not: put the file of pages back beside it, or "
                "delete it"
            )

    @classmethod
    def open(cls, path: Path, store: str, new_store: str = "") -> Self:
        """The journal of the flash whose label names `store`: from `begin` on `new_store`, by default a random name.

        Raises StateError as `read` does. It changes nothing.
        """
        journal = cls(path, store)
        journal._load()
        journal._previous, journal.store, journal._is_found = store, new_store or uuid.uuid4().hex, True
        return journal

    @classmethod
    def read(cls, path: Path, store: str) -> tuple[dict[int, JournalEntry], Sums | None]:
        """`entries` and `sums`. Raises StateError for a file that is damaged before its last line, of another version
        or store."""
        journal = cls(path, store)
        journal._load()
        return journal.entries, journal.sums

    def begin(self) -> None:
        """Write the file under its store's new name, superfluous lines left out; durable, at once or not at all.

        Nothing may be noted from then until the flash's label names the store, durably, and `confirm` was called.
        """
        if self._is_found:
            self._rewrite()
            self._is_found = False

    def confirm(self) -> None:
        """The label names this store: from now on no other one is taken for it."""
        if self._previous:
            self._put({"begun": True})

    def place(self, sequence: int, token_tags: Tags, index_tags: Tags) -> None:
        """Note the numbers by which a sequence's pages go from now on."""
        self._put({"sequence": sequence, "token_tags": _pairs(token_tags), "index_tags": _pairs(index_tags)})
        self.entries[sequence] = self._replace_tags(sequence, token_tags, index_tags)

    def note(self, sequence: int, info: Mapping[str, Any]) -> None:
        """Note what a sequence's user says of it, in place of what was said before."""
        self._put({"sequence": sequence, "info": dict(info)})
        self.entries[sequence] = replace(self.entries[sequence], info=info, noted=None)

    def note_again(self) -> None:
        """Note that what was said of sequences holds for the tags that they have now."""
        for sequence, entry in list(self.entries.items()):
            if entry.noted is not None:
                self.note(sequence, entry.info)

    def keep_partial_group(self, sequence: int, partial: tuple[int, int] | None) -> None:
        """Note where a sequence's tokens after its last full group are: JournalEntry.partial."""
        self._put({"sequence": sequence, "partial": [] if partial is None else list(partial)})
        self.entries[sequence] = replace(self.entries[sequence], partial=partial)

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        self._put({"sequence": sequence, "freed": True})
        del self.entries[sequence]

    def sync(self) -> None:
        """Return when everything noted is durable: at once, where it is already."""
        with self._syncing:
            if self._error is not None:
                raise self._unwritable(self._error)
            end = self._end
            if self._synced == end:
                return
            try:
                os.fsync(self._file().fileno())
            except OSError as error:
                self._error = error  # a second fsync, of another thread, too, would return, and the lines be lost
                raise self._unwritable(error) from error
            self._synced = end

    def close(self, sums: Sums | None) -> None:
        """Note, unless `sums` is None, that all pages are programmed, and release the file; it may be called twice."""
        self._is_found = False
        if self._out is None:
            return
        try:
            if sums is not None:
                self._put({"closed": {str(number): [tokens, _text(v_sum)] for number, (tokens, v_sum) in sums.items()}})
                self.sync()
        finally:
            self._out.close()
            self._out = None

    def _content(self) -> bytes:
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                return file.read()
        except OSError as error:
            raise StateError(
                f"{self.path} must be the readable journal of its store's sequences: {error.strerror}"
            ) from error

    def _load(self) -> None:
        """Set `entries` and `sums`. Raises StateError; a store without a name is any."""
        first, *lines = self._content().split(b"\n")
        if not lines:
            raise StateError(f"{self.path} must begin with the line of its store; it is empty or damaged")
        header = self._body(1, first, 0)
        version, name, previous = self._header(header)
        start, is_begun = len(first) + 1, False
        for number, line in enumerate(lines[:-1], 2):  # what comes after the last line's end is torn, or nothing
            body = self._body(number, line, _seed(name, start) if version >= _NAMED else 0)
            start += len(line) + 1
            if type(body) is dict and body.keys() == {"begun"}:
                is_begun, self.sums = True, None
            else:
                self._apply(f"line {number} of {self.path}", body)
        self._drop_tags_without_a_note()
        if self.store and self.store != name and (is_begun or self.store != previous):
            raise StateError(
                f"{self.path} must be the journal of store {self.store}, not of {name}: keep the two files together, "
                "both of one copy"
            )

    def _drop_tags_without_a_note(self) -> None:
        for sequence, entry in self.entries.items():
            if entry.noted is not None:
                self.entries[sequence], self.sums = entry.noted, None

    def _header(self, body: Any) -> tuple[int, str, str]:
        """Version, and names of the store: now, before."""
        what = f"line 1 of {self.path}"
        version = body.get("version") if type(body) is dict else None
        if type(version) is int and version not in _VERSIONS:
            raise StateError(f"{self.path} must have version {_VERSION}, not {version}")
        if type(version) is not int or version < _NAMED:
            return *check_fields(what, body, version=int, store=str), ""
        version, name, previous = check_fields(what, body, version=int, store=str, previous=str)
        return version, name, previous

    def _body(self, number: int, line: bytes, seed: int) -> Any:
        """The content of a line."""
        checksum, _, text = line.partition(b" ")
        try:
            if int(checksum, 16) == zlib.crc32(text, seed) and len(checksum) == 8:
                return json.loads(text)
        except (ValueError, RecursionError):
            pass
        raise StateError(f"line {number} of {self.path} must carry a valid checksum; the file is damaged")

    def _apply(self, what: str, body: Any) -> None:
        self.sums = None
        if type(body) is dict and "closed" in body:
            (closed,) = check_fields(what, body, closed=dict)
            self.sums = {self._check_known(what, number): _sums(what, value) for number, value in closed.items()}
        elif type(body) is dict and "freed" in body:
            sequence, _ = check_fields(what, body, sequence=int, freed=bool)
            del self.entries[self._check_known(what, sequence)]
        elif type(body) is dict and "info" in body:
            sequence, info = check_fields(what, body, sequence=int, info=dict)
            self.entries[sequence] = replace(self.entries[self._check_known(what, sequence)], info=info, noted=None)
        elif type(body) is dict and "partial" in body:
            sequence, values = check_fields(what, body, sequence=int, partial=list)
            entry = self.entries[self._check_known(what, sequence)]
            self.entries[sequence] = replace(entry, partial=_partial_group(what, values))
        else:
            sequence, *tags = check_fields(what, body, sequence=int, token_tags=list, index_tags=list)
            self.entries[sequence] = self._replace_tags(sequence, *(_tags(what, pairs) for pairs in tags))

    def _replace_tags(self, sequence: int, token_tags: Tags, index_tags: Tags) -> JournalEntry:
        """A sequence's entry with other tags."""
        before = self.entries.get(sequence, JournalEntry(token_tags, index_tags))
        noted = before.noted or (before if before.info else None)
        return replace(before, token_tags=token_tags, index_tags=index_tags, noted=noted)

    def _check_known(self, what: str, sequence: int | str) -> int:
        number = int(sequence) if str(sequence).isdecimal() else -1
        if number not in self.entries:
            raise StateError(f"{what} must be of a sequence of the lines before it, not of {sequence!r:.80}")
        return number

    def _rewrite(self) -> None:
        """The whole file anew, at once or not at all."""
        content = journal_line({"version": _VERSION, "store": self.store, "previous": self._previous}, self.store, 0)
        for sequence, entry in self.entries.items():
            for body in _bodies(sequence, entry):
                content += journal_line(body, self.store, len(content))
        try:
            with replace_file(self.path) as out:
                out.write(content)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._out = os.fdopen(os.open(self.path, flags), "wb", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        self._end = self._synced = len(content)
        self.entries = {sequence: replace(entry, noted=None) for sequence, entry in self.entries.items()}

    def _put(self, body: Mapping[str, Any]) -> None:
        if self._is_found:
            return
        if self._error is not None:
            raise self._unwritable(self._error)
        file = self._file()
        line = journal_line(body, self.store, self._end)
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            try:
                os.ftruncate(file.fileno(), self._end)  # so that the next line is not joined to a part of this one
            except OSError:
                self._error = error
            raise self._unwritable(error) from error
        self._end += len(line)

    def _file(self) -> BinaryIO:
        if self._out is None:
            raise StateError(f"{self.path} must be open: the store was closed")
        return self._out

    def _unwritable(self, error: OSError) -> StateError:
        return StateError(f"{self.path} must be writable: {error.strerror}; check permissions and room")


def _bodies(sequence: int, entry: JournalEntry) -> Iterator[dict[str, Any]]:
    """Lines that state a sequence."""
    yield {"sequence": sequence, "token_tags": _pairs(entry.token_tags), "index_tags": _pairs(entry.index_tags)}
    if entry.info:
        yield {"sequence": sequence, "info": dict(entry.info)}
    if entry.partial is not None:
        yield {"sequence": sequence, "partial": list(entry.partial)}


def _pairs(tags: Tags) -> list[list[int]]:
    return [list(pair) for pair in zip(tags.starts, tags.numbers, strict=True)]


def _tags(what: str, pairs: list[Any]) -> Tags:
    """Raises StateError unless they begin with 0 and rise."""
    rows = [check_integers(f"tags in {what}", pair) for pair in pairs]
    starts = [row[0] for row in rows if len(row) == 2]
    if not rows or len(starts) < len(rows) or starts[0] or any(a >= b for a, b in pairwise(starts)):
        raise StateError(f"{what} must have tags as rising [start, number], the first from 0, not {repr(pairs)[:80]}")
    return Tags(tuple(starts), tuple(row[1] for row in rows))


def _partial_group(what: str, values: list[Any]) -> tuple[int, int] | None:
    """Raises StateError unless they are two numbers, or none."""
    numbers = check_integers(f"the partial group in {what}", values)
    if not numbers:
        return None
    if len(numbers) != 2 or min(numbers) < 0:
        raise StateError(f"{what} must have a partial group as [tokens, number], or [], not {repr(values)[:80]}")
    return numbers[0], numbers[1]


def _text(v_sum: NDArray[np.float64]) -> str:
    return base64.b64encode(v_sum.astype("<f8").tobytes()).decode()


def _sums(what: str, value: Any) -> tuple[int, NDArray[np.float64]]:
    try:
        tokens, text = value
        data = base64.b64decode(text, validate=True)
        if type(tokens) is int and tokens >= 0 and len(data) % 8 == 0:
            return tokens, np.frombuffer(data, "<f8")
    except (TypeError, ValueError):
        pass
    raise StateError(f"{what} must have tokens and sums of each closed sequence, not {repr(value)[:80]}")
