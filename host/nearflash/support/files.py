"""Small files: replaced durably, complete or not at all; read only where they are regular files.

A new file's bytes go to an exclusive temporary name beside it, are flushed to the drive, and take the name at once;
then the folder is flushed. A reader, and a machine that loses power, sees the old file or the new one. A link in the
file's place is replaced, never followed. Files are the user's alone: mode 0600.

Everything here raises OSError, whose `strerror` states what is wrong: callers name the file's kind and what to do.
"""

import codecs
import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = [
    "MAX_TEXT_BYTES",
    "PRIVATE_MODE",
    "PUBLIC_MODE",
    "check_replaceable",
    "check_writable",
    "copy_durably",
    "flush_folder",
    "give_name",
    "open_regular",
    "read_bytes",
    "read_text",
    "refuse_link",
    "remove_on_error",
    "replace_file",
    "write_durably",
]

MAX_TEXT_BYTES = 1 << 28
"""Bytes of the longest text that `read_text` takes."""

PUBLIC_MODE = 0o666
"""Less the user's umask: for files of a checkout, and pages, pictures and traces that hold nothing of a model."""
PRIVATE_MODE = 0o600
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # Ref: linux/fcntl.h, linux/fs.h; renameat2(2)
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def remove_on_error(folder: Path) -> Iterator[None]:
    """Remove what is written meanwhile to a new or empty folder of files where an error, or an interrupt, comes."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()
        if folder.exists() and not existed:
            folder.rmdir()
        raise


@contextmanager
def replace_file(path: Path, *, keep_existing: bool = False, mode: int = PRIVATE_MODE) -> Iterator[IO[bytes]]:
    """A binary file to write, which takes the name `path` when the block ends without an error; else nothing is left.

    Raises OSError, which names `path`, also where a folder, pipe, socket or device has the name; FileExistsError where
    `keep_existing` and the name is taken, at the start or meanwhile.
    """
    check_replaceable(path, keep_existing=keep_existing)
    partial = path.with_name(f".nearflash-{secrets.token_hex(8)}.partial")  # `path`'s own name may have no room
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(partial, flags, mode)
        try:
            with os.fdopen(descriptor, "w+b") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            give_name(partial, path, keep_existing=keep_existing)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)):
            error.filename, error.filename2 = str(path), None
        raise


def check_replaceable(path: Path, *, keep_existing: bool = False) -> None:
    """Raise OSError where `replace_file` could not begin: for commands that first compute what they write.

    Only a regular file, or a link to one or to nothing, is replaced: never a folder, pipe, socket or device; and only
    in a folder that can be written.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        kind = stat.S_IFREG
        if not path.parent.is_dir():
            raise
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if kind != stat.S_IFREG:
        reason = errno.EISDIR if kind == stat.S_IFDIR else errno.EEXIST
        text = os.strerror(reason) if kind == stat.S_IFDIR else "it is no regular file"
        raise OSError(reason, text, str(path))
    if keep_existing and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Raise OSError for what is no folder, or one in which no file can be made."""
    if not folder.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(reason, os.strerror(reason), str(folder))


def refuse_link(path: Path, rule: str, kind: type[Exception]) -> None:
    """Raise an error of this kind for a symbolic link, which must be `rule`; nothing for what is none, or OSError."""
    if path.is_symlink():
        nothing = "" if path.exists() else ", where nothing is"
        raise kind(
            f"{path} must be {rule}, not a link to {path.readlink()}{nothing}: give the file's own path, or remove the "
            "link"
        )


def copy_durably(source: Path, path: Path, *, mode: int = PRIVATE_MODE) -> None:
    """A copy of a regular file, of any length: see `replace_file`. Raises OSError."""
    with os.fdopen(open_regular(source), "rb") as original, replace_file(path, mode=mode) as out:
        shutil.copyfileobj(original, out)


def write_durably(path: Path, content: bytes | str, *, keep_existing: bool = False, mode: int = PRIVATE_MODE) -> None:
    """Write a whole file: see `replace_file`. A text is written as UTF-8. Raises OSError."""
    with replace_file(path, keep_existing=keep_existing, mode=mode) as out:
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
    if _rename_to_free_name(partial, path):
        return
    try:
        os.link(partial, path, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without hard links: the name is claimed by an empty file, then replaced
        if error.errno not in (*_NO_SUCH_CALL, errno.EPERM, errno.EMLINK):
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_MODE))
        partial.replace(path)
    else:
        partial.unlink()


def _rename_to_free_name(partial: Path, path: Path) -> bool:
    """False where the system or the file system has no such call. With a link, a crash can leave a file two names."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(partial), os.fsencode(path)
    if not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE):
        return True
    reason = ctypes.get_errno()
    if reason in _NO_SUCH_CALL:
        return False
    raise OSError(reason, os.strerror(reason), str(path))


def flush_folder(folder: Path) -> None:
    """Make names that were given or taken in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file (0600 where the flags make it); links to one are followed.

    Never waits, as opening a pipe would.

    Raises OSError where it is missing or no regular file (a folder, pipe, socket or device).
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, PRIVATE_MODE)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """A regular file's bytes. Raises OSError, also for one of more than `max_bytes`, of which nothing is read."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # No more than it has: Python makes room for as much as it is to read, and a board has 512 MB.
        content = file.read(min(max_bytes, max(size, MAX_TEXT_BYTES)) + 1) if size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """A regular file's text, without the byte order mark that editors of some systems put before it.

    Raises OSError as `read_bytes`; UnicodeDecodeError (a ValueError) where it is no UTF-8.
    """
    return read_bytes(path, max_bytes).removeprefix(codecs.BOM_UTF8).decode("utf-8")
