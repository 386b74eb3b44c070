"""Measured rates of drives, kept for the programs that plan by it: `nearflash devices --measure` writes it.

One JSON file of the user's (0600): $XDG_STATE_HOME/nearflash/drives.json, ~/.local/state by default. A drive is known
by the file system on it (its id and device number), so that a folder finds its own.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import StateError
from nearflash.storage.io.kernel_queue import AioQueue
from nearflash.storage.io.measure import Rate, faster_queue
from nearflash.storage.io.queue import QUEUES, QueueBackend
from nearflash.support.files import write_durably
from nearflash.support.folders import user_folder
from nearflash.support.tables import TableReader, read_json

__all__ = ["DriveProfile", "find_profile", "keep_profile", "queue_backend"]

_VERSION = 1


@dataclass(frozen=True)
class DriveProfile:
    """Rates of a drive, measured on `date` (ISO 8601)."""

    date: str
    rates: tuple[Rate, ...]

    @property
    def queue(self) -> str:
        """The kernel's queue that reads fastest at random places."""
        return faster_queue(self.rates)

    def rate(self, call: str, request_bytes: int, depth: int) -> float:
        """GB/s of `call` (as Rate has it) in requests of so many bytes, `depth` in flight: of the nearest measured.

        Smaller requests than any measured one count as slower in proportion. Raises StateError where there is none.
        """
        known = self._of(call)
        if not known:
            raise StateError(f"the drive must have been measured for {call}: nearflash devices --measure FOLDER")
        nearest = min(
            known,
            key=lambda rate: (abs(math.log(rate.block_bytes / request_bytes)), abs(math.log(rate.depth / depth))),
        )
        return nearest.median * min(1.0, request_bytes / nearest.block_bytes)

    def fastest(self, call: str) -> float:
        """GB/s of the fastest kind of request."""
        return max((rate.median for rate in self._of(call)), default=0.0)

    def _of(self, call: str) -> list[Rate]:
        """Rates of a call; at random places, of the queue that is used."""
        return [rate for rate in self.rates if rate.call == call and (call != "random" or rate.queue == self.queue)]


@dataclass(frozen=True)
class _Stored:
    """The file's table; profiles by drive."""

    version: int
    drives: Mapping[str, DriveProfile]


def keep_profile(folder: Path, rates: Iterable[Rate], date: str, file: Path | None = None) -> Path:
    """Note the rates of the drive under `folder`, in place of older ones; returns the file. Raises StateError."""
    file = file or _default_file()
    every = _read(file) if file.exists() else {}
    every[_drive(folder)] = DriveProfile(date, tuple(rates))
    drives = {name: asdict(profile) for name, profile in every.items()}
    text = json.dumps({"version": _VERSION, "drives": drives}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(file, text)
    except OSError as error:
        raise StateError(f"{file} must be writable to keep the drive's rates: {error.strerror}") from error
    return file


def find_profile(folder: Path, file: Path | None = None) -> DriveProfile | None:
    """The rates measured of the drive under `folder`; None where it never was. Raises StateError for a damaged file."""
    file = file or _default_file()
    return _read(file).get(_drive(folder)) if file.exists() else None


def queue_backend(folder: Path, depth: int = 256) -> QueueBackend:
    """A queue as was measured to be fastest of the drive under `folder`; io_submit where none was, or can be had now.

    Raises StateError where there is no queue at all, or for a damaged file of rates.
    """
    profile = find_profile(folder)
    try:
        return QueueBackend(depth, profile.queue if profile else AioQueue.name)
    except StateError:  # measured outside the container that this process is in
        return QueueBackend(depth)


def _default_file() -> Path:
    return user_folder("XDG_STATE_HOME") / "drives.json"


def _drive(folder: Path) -> str:
    status, system = folder.stat(), os.statvfs(folder)
    return f"{system.f_fsid:016x}-{os.major(status.st_dev)}:{os.minor(status.st_dev)}"


def _read(file: Path) -> dict[str, DriveProfile]:
    what = f"the drives' rates in {file}"
    body = read_json(file, StateError, "remove the file and measure again")
    stored = TableReader(StateError, _rule).parse(_Stored, body, what)
    if stored.version != _VERSION:
        raise StateError(f"{what} must have version {_VERSION}, not {stored.version}; remove it and measure again")
    return dict(stored.drives)


def _rule(key: str, hint: Any, value: Any) -> str:
    if key == "call":
        return "" if value in ("read", "write", "random") else "read, write or random"
    if key == "queue":
        return "" if value in QUEUES else " or ".join(QUEUES)
    return "" if hint not in (int, float) or 0 < value < math.inf else "a positive number"
