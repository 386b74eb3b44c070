"""The digest of a large file's content, read once: kept by what the file system states of the file.

A file that has device, inode, size and times of its last changes as when it was read is not read again. One changed
within the last seconds is not kept: it may change again within the clock's step.
"""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nearflash.abi.errors import StateError
from nearflash.support.files import open_regular, read_text, write_durably
from nearflash.support.folders import user_folder

__all__ = ["file_digest"]

_PART_BYTES = 8 << 20
_STEP_NS = 3_000_000_000
"""File systems' times have steps of up to two seconds."""


def file_digest(path: Path, descriptor: int | None = None) -> str:
    """SHA-256, hexadecimal, of a regular file's SHA-256s of 8 MiB each. Raises StateError where it cannot be read, or
    changes meanwhile.

    descriptor: of the file where it is open already: the name may be another one's by now.
    """
    try:
        fd = open_regular(path) if descriptor is None else os.dup(descriptor)
        try:
            before = _stamp(fd)
            kept = _recall(before)
            if kept is not None:
                return kept
            digest = _read(fd, before["size"])
            if _stamp(fd) != before:
                raise StateError(f"{path} must stay as it is while it is read, but it changed: try again")
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"{path} must be readable to be compared ({error.strerror}): check the file") from error
    if time.time_ns() - max(before["mtime_ns"], before["ctime_ns"]) > _STEP_NS:
        _keep(before, digest)
    return digest


def _stamp(fd: int) -> dict[str, int]:
    status = os.fstat(fd)
    return {"device": status.st_dev, "inode": status.st_ino, "size": status.st_size, "mtime_ns": status.st_mtime_ns,
            "ctime_ns": status.st_ctime_ns}  # fmt: skip


def _read(fd: int, size: int) -> str:
    def part(at: int) -> bytes:
        data = os.pread(fd, _PART_BYTES, at)
        return hashlib.sha256(data).digest()

    digest = hashlib.sha256(str(size).encode())
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "nearflash-identity") as pool:
        for part_digest in pool.map(part, range(0, size, _PART_BYTES)):
            digest.update(part_digest)
    return digest.hexdigest()


# What was read before


def _place(stamp: dict[str, int]) -> Path:
    return user_folder("XDG_CACHE_HOME") / "digests" / f"{stamp['device']:x}-{stamp['inode']:x}.json"


def _recall(stamp: dict[str, int]) -> str | None:
    """The digest in a file of the user's own that nobody else can write; anything else counts as none."""
    try:
        path = _place(stamp)
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return None
        body = json.loads(read_text(path, 4096))
    except (OSError, ValueError, RecursionError):
        return None
    digest = body.pop("sha256", None) if isinstance(body, dict) else None
    return digest if body == stamp and isinstance(digest, str) else None


def _keep(stamp: dict[str, int], digest: str) -> None:
    try:
        path = _place(stamp)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(path, json.dumps(stamp | {"sha256": digest}))
    except OSError:
        return  # it is read again the next time
