"""Small files: replaced durably, complete or not at all; read only where they are regular files.

A new file's bytes go to an exclusive temporary name beside it, are flushed to the drive, and take the name at once;
then the folder is flushed. A reader, and a machine that loses power, sees the old file or the new one. A link in the
file's place is replaced, never followed. Files are the user's alone: mode 0600.

Everything here raises OSError, whose `strerror` states what is wrong: callers name the file's kind and what to do.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["MAX_TEXT_BYTES", "flush_folder", "give_name", "open_regular", "read_text", "replaced", "write_durably"]

MAX_TEXT_BYTES = 1 << 28
"""Bytes of the longest text that `read_text` takes."""

_MODE = 0o600


@contextmanager
def replaced(path: Path, *, keep_existing: bool = False, mode: int = _MODE) -> Iterator[IO[bytes]]:
    """A binary file to write, which takes the name `path` when the block ends without an error; else nothing is left.

    Raises OSError; FileExistsError where `keep_existing` and the name is taken, at the start or meanwhile.
    """
    if keep_existing and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    partial = path.with_name(f".nearflash-{secrets.token_hex(8)}.partial")  # `path`'s own name may have no room
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, mode)
    try:
        with os.fdopen(descriptor, "w+b") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        give_name(partial, path, keep_existing=keep_existing)
    finally:
        partial.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes | str, *, keep_existing: bool = False, mode: int = _MODE) -> None:
    """Write a whole file: see `replaced`. A text is written as UTF-8. Raises OSError."""
    with replaced(path, keep_existing=keep_existing, mode=mode) as out:
        out.write(content.encode("utf-8") if isinstance(content, str) else content)


def give_name(partial: Path, path: Path, *, keep_existing: bool = False) -> None:
    """Give a complete, flushed file of the same folder its name, durably.

    Raises OSError; FileExistsError where `keep_existing` and another file has the name: both stay as they are.
    """
    if keep_existing:
        _take_free_name(partial, path)
    else:
        partial.replace(path)
    flush_folder(path.parent)


def _take_free_name(partial: Path, path: Path) -> None:
    try:
        os.link(partial, path, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without hard links: the name is claimed by an empty file, then replaced
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
        partial.replace(path)
    else:
        partial.unlink()


def flush_folder(folder: Path) -> None:
    """Make names that were given or taken in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; links to one are followed. Never waits, as opening a pipe would.

    Raises OSError where it is missing or no regular file (a folder, pipe, socket or device).
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """A regular file's text. Raises OSError, also for one of more than `max_bytes`; UnicodeDecodeError (a ValueError)
    where it is no UTF-8."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return content.decode("utf-8")
