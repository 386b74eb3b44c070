"""The journal of a store's sequences, in a file beside that of their pages: what makes pages a sequence again.

One line for each change: CRC-32 of the rest as 8 hexadecimal digits, a space, JSON. Of each sequence the last line
of a kind counts, so that the file's beginning alone is a state, too: an older one. A last line that is torn is dropped.

    store    {"version", "store"}: that the flash's label names; the first line
    tags     {"sequence", "token_tags", "index_tags"}: numbers that its pages go by, [first group or block, number]
    info     {"sequence", "info"}: what its user notes of it
    partial  {"sequence", "partial"}: [tokens, number] of the partial group at its end; []: none
    freed    {"sequence", "freed"}
    closed   {"closed": {sequence: [tokens, sums of V]}}: all pages were programmed; the last line, else it says nothing
"""

import base64
import contextlib
import errno
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.io.direct import flush_directory
from nearflash.storage.io.sealed import fields, integers
from nearflash.storage.kv.sequence import Tags

__all__ = ["JournalEntry", "SequenceJournal", "journal_path"]

_VERSION, _VERSIONS = 2, (1, 2)
"""Written, and read: version 1 has none of "partial"."""
Sums = Mapping[int, tuple[int, NDArray[np.float64]]]
"""Tokens, and sums of their V, flat, by sequence."""


def journal_path(flash: Path) -> Path:
    """Where the journal of a flash in a file lies."""
    return flash.with_name(f"{flash.name}.sequences")


@dataclass(frozen=True)
class JournalEntry:
    """One sequence."""

    token_tags: Tags
    index_tags: Tags
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    partial: tuple[int, int] | None = None
    """The sequence's tokens, and the number that pages of the last ones go by."""


class SequenceJournal:
    """An open journal (mode 0600). The lock of the flash that it belongs to is its own, too.

    Use `create` or `open`. Raises StateError where the file cannot be written.
    """

    def __init__(self, path: Path, store: str) -> None:
        """Not for callers."""
        self.path, self.store = path, store
        self.entries: dict[int, JournalEntry] = {}
        self.sums: Sums | None = None
        """Where the store was closed: whole groups' tokens and sums of V, flat, by sequence; None after a crash."""
        self._out: BinaryIO | None = None

    @classmethod
    def create(cls, path: Path, store: str) -> Self:
        """An empty journal; one that is there is replaced."""
        journal = cls(path, store)
        journal._rewrite()
        return journal

    @classmethod
    def open(cls, path: Path, store: str) -> Self:
        """The journal of the store with this identity; its superfluous lines are dropped.

        Raises StateError as `read` does; then it changes nothing.
        """
        journal = cls(path, store)
        journal.entries, journal.sums = cls.read(path, store)
        journal._rewrite()
        return journal

    @classmethod
    def read(cls, path: Path, store: str) -> tuple[dict[int, JournalEntry], Sums | None]:
        """`entries` and `sums`. Raises StateError for a file that is damaged before its last line, of another version
        or store."""
        journal = cls(path, store)
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise StateError(
                f"{path} must be the readable journal of its store's sequences: {error.strerror}"
            ) from error
        bodies = [journal._body(number, line, last=number == len(lines)) for number, line in enumerate(lines, 1)]
        if bodies[0] is None:
            raise StateError(f"{path} must begin with the line of its store; it is empty or damaged")
        version, name = fields(f"line 1 of {path}", bodies[0], version=int, store=str)
        if version not in _VERSIONS:
            raise StateError(f"{path} must have version {_VERSION}, not {version}")
        if name != store:
            raise StateError(f"{path} must be the journal of store {store}, not of {name}: keep the two files together")
        for number, body in enumerate(bodies[1:-1], 2):
            journal._apply(f"line {number} of {path}", body)
        return journal.entries, journal.sums

    def place(self, sequence: int, token_tags: Tags, index_tags: Tags) -> None:
        """Note the numbers by which a sequence's pages go from now on."""
        self._put({"sequence": sequence, "token_tags": _pairs(token_tags), "index_tags": _pairs(index_tags)})
        self.entries[sequence] = self._placed(sequence, token_tags, index_tags)

    def note(self, sequence: int, info: Mapping[str, Any]) -> None:
        """Note what a sequence's user says of it, in place of what was said before."""
        self._put({"sequence": sequence, "info": dict(info)})
        self.entries[sequence] = replace(self.entries[sequence], info=info)

    def keep_partial_group(self, sequence: int, partial: tuple[int, int] | None) -> None:
        """Note where a sequence's tokens after its last full group are: JournalEntry.partial."""
        self._put({"sequence": sequence, "partial": [] if partial is None else list(partial)})
        self.entries[sequence] = replace(self.entries[sequence], partial=partial)

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        self._put({"sequence": sequence, "freed": True})
        del self.entries[sequence]

    def sync(self) -> None:
        """Return when everything noted is durable."""
        if self._out is not None:
            try:
                os.fsync(self._out.fileno())
            except OSError as error:
                raise self._unwritable(error) from error

    def close(self, sums: Sums | None) -> None:
        """Note, unless `sums` is None, that all pages are programmed, and release the file; it may be called twice."""
        if self._out is None:
            return
        try:
            if sums is not None:
                self._put({"closed": {str(one): [tokens, _text(v_sum)] for one, (tokens, v_sum) in sums.items()}})
                self.sync()
        finally:
            self._out.close()
            self._out = None

    def _body(self, number: int, line: bytes, *, last: bool) -> Any:
        """What a line says; None for the last one, if it is torn (or empty, as behind a line's end)."""
        checksum, _, text = line.partition(b" ")
        try:
            if int(checksum, 16) == zlib.crc32(text) and len(checksum) == 8 and not last:
                return json.loads(text)
        except (ValueError, RecursionError):
            pass
        if last:
            return None
        raise StateError(f"line {number} of {self.path} must carry a valid checksum; the file is damaged")

    def _apply(self, what: str, body: Any) -> None:
        self.sums = None
        if type(body) is dict and "closed" in body:
            (closed,) = fields(what, body, closed=dict)
            self.sums = {self._known(what, one): _sums(what, value) for one, value in closed.items()}
        elif type(body) is dict and "freed" in body:
            sequence, _ = fields(what, body, sequence=int, freed=bool)
            del self.entries[self._known(what, sequence)]
        elif type(body) is dict and "info" in body:
            sequence, info = fields(what, body, sequence=int, info=dict)
            self.entries[sequence] = replace(self.entries[self._known(what, sequence)], info=info)
        elif type(body) is dict and "partial" in body:
            sequence, values = fields(what, body, sequence=int, partial=list)
            entry = self.entries[self._known(what, sequence)]
            self.entries[sequence] = replace(entry, partial=_partial_group(what, values))
        else:
            sequence, *tags = fields(what, body, sequence=int, token_tags=list, index_tags=list)
            self.entries[sequence] = self._placed(sequence, *(_tags(what, pairs) for pairs in tags))

    def _placed(self, sequence: int, token_tags: Tags, index_tags: Tags) -> JournalEntry:
        """A sequence's entry with other tags."""
        before = self.entries.get(sequence, JournalEntry(token_tags, index_tags))
        return replace(before, token_tags=token_tags, index_tags=index_tags)

    def _known(self, what: str, sequence: int | str) -> int:
        number = int(sequence) if str(sequence).isdecimal() else -1
        if number not in self.entries:
            raise StateError(f"{what} must be of a sequence of the lines before it, not of {sequence!r:.80}")
        return number

    def _rewrite(self) -> None:
        """The whole file anew, at once or not at all."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._out = os.fdopen(os.open(partial, flags, 0o600), "wb", buffering=0)
            self._put({"version": _VERSION, "store": self.store})
            for sequence, entry in self.entries.items():
                self._put({"sequence": sequence, "token_tags": _pairs(entry.token_tags),
                           "index_tags": _pairs(entry.index_tags)})  # fmt: skip
                if entry.info:
                    self._put({"sequence": sequence, "info": dict(entry.info)})
                if entry.partial is not None:
                    self._put({"sequence": sequence, "partial": list(entry.partial)})
            self.sync()
            partial.replace(self.path)
            flush_directory(self.path.parent)
        except BaseException as error:
            self.close(None)
            partial.unlink(missing_ok=True)
            if isinstance(error, OSError) and not isinstance(error, StateError):
                raise self._unwritable(error) from error
            raise

    def _put(self, body: Mapping[str, Any]) -> None:
        text = json.dumps(body, separators=(",", ":")).encode()
        if self._out is None:
            raise StateError(f"{self.path} must be open: the store was closed")
        end = os.fstat(self._out.fileno()).st_size
        try:
            line = b"%08x %b\n" % (zlib.crc32(text), text)
            if self._out.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._out.fileno(), end)  # so that the next line is not joined to a part of this one
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> StateError:
        return StateError(f"{self.path} must be writable: {error.strerror}; check permissions and room")


def _pairs(tags: Tags) -> list[list[int]]:
    return [list(pair) for pair in zip(tags.starts, tags.numbers, strict=True)]


def _tags(what: str, pairs: list[Any]) -> Tags:
    """Raises StateError unless they begin with 0 and rise."""
    rows = [integers(f"tags in {what}", pair) for pair in pairs]
    starts = [row[0] for row in rows if len(row) == 2]
    if not rows or len(starts) < len(rows) or starts[0] or any(a >= b for a, b in pairwise(starts)):
        raise StateError(f"{what} must have tags as rising [start, number], the first from 0, not {repr(pairs)[:80]}")
    return Tags(tuple(starts), tuple(row[1] for row in rows))


def _partial_group(what: str, values: list[Any]) -> tuple[int, int] | None:
    """Raises StateError unless they are two numbers, or none."""
    numbers = integers(f"the partial group in {what}", values)
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
