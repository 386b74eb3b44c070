"""Measured rates of drives, kept for the programs that plan by it: `nearflash devices --measure` writes it.

One JSON file of the user's (0600): $XDG_STATE_HOME/nearflash/drives.json, ~/.local/state by default. A drive is known
by the file system on it (its id and device number), so that a folder finds its own.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import StateError
from nearflash.storage.io.measure import Rate
from nearflash.support.files import write_durably
from nearflash.support.folders import user_folder
from nearflash.support.tables import check_fields, read_json

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


def keep_profile(folder: Path, rates: Iterable[Rate], date: str, file: Path | None = None) -> Path:
    """Note the rates of the drive under `folder`, in place of older ones; returns the file. Raises StateError."""
    file = file or _default_file()
    every = _read(file) if file.exists() else {}
    every[_drive(folder)] = {"date": date, "rates": [asdict(rate) for rate in rates]}
    text = json.dumps({"version": _VERSION, "drives": every}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(file, text)
    except OSError as error:
        raise StateError(f"{file} must be writable to keep the drive's rates: {error.strerror}") from error
    return file


def find_profile(folder: Path, file: Path | None = None) -> DriveProfile | None:
    """The rates measured of the drive under `folder`; None where it never was. Raises StateError for a damaged file."""
    file = file or _default_file()
    if not file.exists():
        return None
    stored = _read(file).get(_drive(folder))
    return None if stored is None else _profile(file, stored)


def _default_file() -> Path:
    return user_folder("XDG_STATE_HOME") / "drives.json"


def _drive(folder: Path) -> str:
    status, system = folder.stat(), os.statvfs(folder)
    return f"{system.f_fsid:016x}-{os.major(status.st_dev)}:{os.minor(status.st_dev)}"


def _read(file: Path) -> dict[str, Any]:
    what = f"the drives' rates in {file}"
    body = read_json(file, StateError, "remove the file and measure again")
    version, drives = check_fields(what, body, version=int, drives=dict)
    if version != _VERSION:
        raise StateError(f"{what} must have version {_VERSION}, not {version}; remove the file and measure again")
    for stored in drives.values():
        _profile(file, stored)
    return dict(drives)


def _profile(file: Path, found: Any) -> DriveProfile:
    what = f"the drives' rates in {file}"
    date, rates = check_fields(what, found, date=str, rates=list)
    return DriveProfile(date, tuple(_rate(what, rate) for rate in rates))


def _rate(what: str, body: Any) -> Rate:
    values = check_fields(what, body, call=str, block_bytes=int, depth=int, median=float, low=float, high=float)
    call, block_bytes, depth, *speeds = values
    if call not in ("read", "write", "random") or not block_bytes or not depth or not _are_positive(speeds):
        raise StateError(f"{what} must be of read, write or random, with positive numbers, not {body!r}")
    return Rate(*values)


def _are_positive(speeds: Sequence[float]) -> bool:
    return all(math.isfinite(speed) and speed > 0 for speed in speeds)
