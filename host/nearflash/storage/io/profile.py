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
from nearflash.storage.io.measure import Rate
from nearflash.support.files import write_durably
from nearflash.support.folders import user_folder
from nearflash.support.tables import TableReader, read_json

__all__ = ["DriveProfile", "find_profile", "keep_profile"]

_VERSION = 1


@dataclass(frozen=True)
class DriveProfile:
    """Rates of a drive, measured on `date` (ISO 8601)."""

    date: str
    rates: tuple[Rate, ...]

    def rate(self, call: str, request_bytes: int, depth: int) -> float:
        """GB/s of `call` (as Rate has it) in requests of so many bytes, `depth` in flight: of the nearest measured.

        Smaller requests than any measured one count as slower in proportion. Raises StateError where there is none.
        """
        known = [rate for rate in self.rates if rate.call == call]
        if not known:
            raise StateError(f"the drive must have been measured for {call}: nearflash devices --measure FOLDER")
        nearest = min(
            known,
            key=lambda rate: (abs(math.log(rate.block_bytes / request_bytes)), abs(math.log(rate.depth / depth))),
        )
        return nearest.median * min(1.0, request_bytes / nearest.block_bytes)

    def fastest(self, call: str) -> float:
        """GB/s of the fastest kind of request."""
        return max((rate.median for rate in self.rates if rate.call == call), default=0.0)


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
    return "" if hint not in (int, float) or 0 < value < math.inf else "a positive number"
