"""What a drive may hold after its power was cut, from the log of its writes and flushes.

All that was written before the last flush is there. Of what came after it each write may be there, or not, or some of
its 4,096-byte blocks. QEMU's NVMe drive completes writes with FUA as any other and does not log them as such: commit
blocks of ext4's journal and log records of xfs, which these write with FUA, count as durable at once.

Source: Linux, Documentation/admin-guide/device-mapper/log-writes.rst, drivers/md/dm-log-writes.c; fs/jbd2/commit.c;
fs/xfs/xfs_log.c.
"""

import json
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PART_BYTES", "Cut", "Log"]

PART_BYTES = 64 << 10
_MAGIC = 0x6A736677736872
_FLUSH, _FUA, _DISCARD = 1, 2, 4
_BLOCK_BYTES = 4096
_MARK = b"NFMARK"
_EXT4_COMMIT = struct.pack(">II", 0xC03B3998, 2)
_XFS_RECORD = struct.pack(">I", 0xFEEDBABE)
_KEPT, _TORN = 0.5, 0.3


@dataclass(frozen=True)
class _Entry:
    offset: int
    flags: int
    data: bytes
    mark: dict[str, Any] | None

    @property
    def is_durable(self) -> bool:
        return bool(self.flags & _FUA) or self.data.startswith((_EXT4_COMMIT, _XFS_RECORD))


@dataclass(frozen=True)
class Cut:
    """A moment: what the drive has then, and the marks of before it and of after it.

    The image is that of the next moment, too, once that is asked for. Outside of the parts of PART_BYTES that begin at
    `parts` it is zero.
    """

    number: int
    image: bytearray
    parts: Sequence[int]
    marks: list[dict[str, Any]]
    following: list[dict[str, Any]]


class Log:
    """A log that QEMU has written."""

    def __init__(self, path: Path) -> None:
        self.entries = list(_read(path))
        self.flushes = sum(bool(entry.flags & _FLUSH) for entry in self.entries)
        self._marked = [(at, entry.mark) for at, entry in enumerate(self.entries) if entry.mark is not None]

    def cuts(self, base: Path, count: int, seed: int | str, *, flushes: bool = True) -> Iterator[Cut]:
        """So many random moments after the first mark. flushes=False, the control: the drive ignores those after it."""
        rng = random.Random(seed)
        first = next(at for at, mark in self._marked if "done" in mark)
        moments = sorted(rng.randrange(first, len(self.entries)) for _ in range(count))
        durable, pending, position = bytearray(base.read_bytes()), list[_Entry](), 0
        image, parts = bytearray(len(durable)), self._find_parts(durable)
        for moment in moments:
            while position <= moment:
                entry = self.entries[position]
                if entry.flags & _FLUSH and (flushes or position <= first):
                    for before in pending:
                        _apply(durable, before)
                    pending = []
                if entry.data and entry.mark is None:
                    pending.append(entry)
                position += 1
            for start in parts:
                image[start : start + PART_BYTES] = durable[start : start + PART_BYTES]
            for entry in pending:
                _apply_some(image, entry, rng, flushes)
            marks = [mark for at, mark in self._marked if at <= moment]
            yield Cut(moment, image, parts, marks, [mark for at, mark in self._marked if at > moment])

    def _find_parts(self, base: bytearray) -> list[int]:
        """Where the parts begin that are not zero, or are written."""
        zeros = bytes(PART_BYTES)
        used = {at for at in range(0, len(base), PART_BYTES) if base[at : at + PART_BYTES] != zeros[: len(base) - at]}
        for entry in self.entries:
            used.update(range(entry.offset // PART_BYTES * PART_BYTES, entry.offset + len(entry.data), PART_BYTES))
        return sorted(used)


def _apply(image: bytearray, entry: _Entry) -> None:
    image[entry.offset : entry.offset + len(entry.data)] = entry.data


def _apply_some(image: bytearray, entry: _Entry, rng: random.Random, fua: bool) -> None:
    """Put a write that was not flushed into the image, or not, or some of its blocks."""
    if fua and entry.is_durable:
        _apply(image, entry)
        return
    if rng.random() >= _KEPT:
        return
    torn = len(entry.data) > _BLOCK_BYTES and rng.random() < _TORN
    for start in range(0, len(entry.data), _BLOCK_BYTES):
        if not torn or rng.random() < _KEPT:
            part = entry.data[start : start + _BLOCK_BYTES]
            image[entry.offset + start : entry.offset + start + len(part)] = part


def _read(path: Path) -> Iterator[_Entry]:
    with path.open("rb") as file:
        magic, _, count, sector_bytes = struct.unpack("<QQQI", file.read(28))
        if magic != _MAGIC:
            raise RuntimeError(f"{path} must be a log of writes, not begin with {magic:#x}")
        file.seek(sector_bytes)
        for _ in range(count):
            sector, sectors, flags, _ = struct.unpack("<QQQQ", file.read(sector_bytes)[:32])
            data = file.read(sectors * sector_bytes) if sectors and not flags & _DISCARD else b""
            mark = json.loads(data[len(_MARK) :]) if data.startswith(_MARK) else None
            yield _Entry(sector * sector_bytes, flags, data, mark)
