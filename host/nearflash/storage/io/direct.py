"""Files read and written past the page cache (O_DIRECT), with errors that name file, offset and what to do.

Offsets, lengths and memory addresses are multiples of 4096 bytes. An `IoBackend` moves the bytes; `PositionalBackend`
does it with one blocking call after another, and a back end with queues can replace it with the same three calls.

Source: open(2), section NOTES / O_DIRECT; preadv(2).
"""

import contextlib
import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import AlignmentError, StateError, StorageFullError
from nearflash.device.memory import anonymous as aligned_buffer
from nearflash.storage.io.backend import BLOCK_BYTES, IoBackend, PositionalBackend
from nearflash.support.closing import Closing
from nearflash.support.files import flush_folder, refuse_link

__all__ = [
    "DirectFile",
    "aligned_buffer",
    "flush_directory",
    "partial_of",
]

_Call = Callable[[int, memoryview, int], int]
_CallOfVectors = Callable[[int, Sequence[memoryview], int], int]
_CallOfMany = Callable[[int, NDArray[np.uint8], NDArray[np.int64]], int]
_ATTEMPTS = 8
"""To open a file that others replace."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DirectFile(Closing):
    """One open file. Use `create` or `open`; close it, or use it as a context manager.

    `direct=False` goes through the page cache: for file systems without O_DIRECT. There is no silent fallback.
    """

    def __init__(
        self, path: Path, flags: int, direct: bool, backend: IoBackend | None, access: int = os.O_RDWR
    ) -> None:
        self.path, self.direct = path, direct
        self.backend = backend or PositionalBackend()
        if path.is_block_device():
            flags = os.O_EXCL  # which Linux refuses where the device, or a part of it, is mounted
        flags |= access | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in its place is not waited for
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno == errno.EINVAL and direct:
                raise StateError(
                    f"{path} must be on a file system with O_DIRECT (ext4, xfs, btrfs); "
                    "move it there, or pass direct=False to go through the page cache"
                ) from error
            refuse_link(path, f"a file that can be opened ({error.strerror})", StateError)
            raise StateError(f"{path} cannot be opened ({error.strerror}): check path and permissions") from error
        self._release = weakref.finalize(self, _unlock_and_close, self._fd)
        os.set_blocking(self._fd, True)  # else io_uring returns before the drive has answered
        _open_files.add(self)

    @classmethod
    def create(
        cls, path: Path, size_bytes: int, *, direct: bool = True, backend: IoBackend | None = None,
        check: Callable[[Self], None] = lambda file: None,
    ) -> Self:  # fmt: skip
        """A new or emptied file (mode 0600), locked, with room for all of its bytes; or a block device as it is.

        `check` is called with a file that was there, locked, and raises where that must stay as it is.
        Raises StorageFullError where the disk has no room (the file is then removed, if made here), else StateError.
        """
        flags, made = os.O_NOFOLLOW, True
        for _ in range(_ATTEMPTS):
            try:
                file = cls(path, flags | (os.O_CREAT | os.O_EXCL if made else 0), direct, backend)
            except FileExistsError:
                made = False
                continue
            if file._take_lock():
                break
            made = True
        else:
            raise _name_error(path)
        try:
            file._check_kind()
            if not made or path.is_block_device():
                check(file)
            if not made:
                file._check_own()
            file._reserve(size_bytes)
        except BaseException:
            if made and path.is_file():
                path.unlink(missing_ok=True)
            file.close()
            raise
        return file

    @classmethod
    def open(cls, path: Path, *, direct: bool = True, backend: IoBackend | None = None, writable: bool = True) -> Self:
        """An existing file, locked against other processes. Raises StateError.

        writable: else it is only read, and may lie where nothing can be written.
        """
        for _ in range(_ATTEMPTS):
            file = cls(path, 0, direct, backend, os.O_RDWR if writable else os.O_RDONLY)
            if file._take_lock():
                file._check_kind()
                return file
        raise _name_error(path)

    @classmethod
    def open_to_read(cls, path: Path, *, direct: bool = True, backend: IoBackend | None = None) -> Self:
        """An existing file without its lock, also while another process writes it; nothing can be written by it.

        Raises StateError.
        """
        file = cls(path, os.O_NONBLOCK, direct, backend, os.O_RDONLY)  # a pipe without writer would be waited for
        file._check_kind()
        return file

    def _take_lock(self) -> bool:
        """Take the lock; False, and closed, where the path is another file's by now. Raises StateError, closed, too."""
        try:
            self.lock()
            if self.has_its_name():
                return True
        except BaseException:
            self.close()
            raise
        self.close()
        return False

    def _check_kind(self) -> None:
        mode = os.fstat(self._fd).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            self.close()
            raise StateError(f"{self.path} must be a file or a block device, not a {stat.filemode(mode)}")

    def _check_own(self) -> None:
        """Check one that was there: its maker could read what is stored now; its other names would lose their bytes."""
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            return
        if status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise StateError(f"{self.path} must be yours alone to be emptied, with one name: choose another path")
        os.fchmod(self._fd, 0o600)

    def has_its_name(self) -> bool:
        """Whether its path is still this file's, and no other's."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return False

    @property
    def size_bytes(self) -> int:
        """Length of the file or block device, in bytes."""
        return os.lseek(self._fd, 0, os.SEEK_END)

    def lock(self) -> None:
        """Take the file for this open file alone. Raises StateError when another one holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StateError(
                f"{self.path} is in use by another process, or open in this one already: close it there, or take "
                "another path"
            ) from error

    def _reserve(self, size_bytes: int) -> None:
        if self.path.is_block_device():
            if self.size_bytes < size_bytes:
                raise StorageFullError(f"{self.path} must have {size_bytes} bytes, not {self.size_bytes}; ask for less")
            return
        try:
            os.ftruncate(self._fd, 0)
            os.posix_fallocate(self._fd, 0, size_bytes)
        except OSError as error:
            raise self._failure("reserving", size_bytes, 0, error) from error

    def read(self, offset: int, memory: NDArray[np.uint8]) -> None:
        """Fill `memory` from the file. Raises AlignmentError, StateError (short file, I/O error)."""
        self._transfer("reading", self.backend.read, offset, memory)

    def read_many(self, offsets: NDArray[np.int64], memory: NDArray[np.uint8]) -> None:
        """Fill each row of `memory` (p, bytes) from its offset (p,). Raises as `read`."""
        self._transfer_many("reading", self.backend.read_many, offsets, memory)

    def write_many(self, offsets: NDArray[np.int64], memory: NDArray[np.uint8]) -> None:
        """Write each row of `memory` (p, bytes) at its offset (p,). Raises as `write`, after some rows."""
        self._transfer_many("writing", self.backend.write_many, offsets, memory)

    def scatter(self, offset: int, memories: Sequence[memoryview]) -> None:
        """Fill one memory (bytes, aligned, of whole blocks) after another from the file, as `read`."""
        self._transfer_vectors("reading", self.backend.scatter, offset, memories)

    def gather(self, offset: int, memories: Sequence[memoryview]) -> None:
        """Write one memory (bytes, aligned, of whole blocks) after another, as `write`."""
        self._transfer_vectors("writing", self.backend.gather, offset, memories)

    def write(self, offset: int, memory: NDArray[np.uint8]) -> None:
        """Write `memory`; durable after `flush`. Raises AlignmentError, StorageFullError, StateError."""
        self._transfer("writing", self.backend.write, offset, memory)

    def flush(self) -> None:
        """Make all writes durable. After a StateError from here nothing is known about them."""
        try:
            self.backend.flush(self._fd)
        except OSError as error:
            raise self._failure("flushing", 0, 0, error) from error

    def close(self) -> None:
        """Release the lock and close the file; it may be called twice."""
        self._release()
        self._fd = -1

    def _forget(self) -> None:
        """In the child of a fork: the file, and its lock, are the parent's alone."""
        if self._release.detach():
            os.close(self._fd)
            self._fd = -1

    def _transfer(self, action: str, call: _Call, offset: int, memory: NDArray[np.uint8]) -> None:
        self._check(offset, memory.nbytes, memory.ctypes.data)
        try:
            done = call(self._fd, memory.data.cast("B"), offset)
        except OSError as error:
            raise self._failure(action, memory.nbytes, offset, error) from error
        self._check_done(offset, done, memory.nbytes)

    def _transfer_vectors(self, action: str, call: _CallOfVectors, offset: int, memories: Sequence[memoryview]) -> None:
        total = sum(map(len, memories))
        self._check(offset, total)
        try:
            done = call(self._fd, memories, offset)
        except OSError as error:
            raise self._failure(action, total, offset, error) from error
        self._check_done(offset, done, total)

    def _transfer_many(
        self, action: str, call: _CallOfMany, offsets: NDArray[np.int64], memory: NDArray[np.uint8]
    ) -> None:
        if not len(offsets):
            return
        self._check(int(np.bitwise_or.reduce(offsets)), memory.shape[1], memory.ctypes.data | memory.strides[0])
        try:
            done = call(self._fd, memory, offsets)
        except OSError as error:
            raise self._failure(action, memory.nbytes, int(offsets.min()), error) from error
        self._check_done(int(offsets.min()), done, memory.nbytes)

    @staticmethod
    def _check(offset: int, size_bytes: int, address: int = 0) -> None:
        for name, value in (("offset", offset), ("length", size_bytes), ("address", address)):
            if value % BLOCK_BYTES:
                raise AlignmentError(f"{name} of direct I/O must be a multiple of {BLOCK_BYTES}, not {value}")

    def _check_done(self, offset: int, done: int, size_bytes: int) -> None:
        if done != size_bytes:
            raise StateError(
                f"{self.path} must have {size_bytes} bytes at offset {offset}, not {done}: the file was cut short; "
                "restore it from a copy"
            )

    def _failure(self, action: str, size_bytes: int, offset: int, error: OSError) -> StateError:
        if self._fd < 0:
            return StateError(f"{self.path} must be open in this process, not closed or a fork's: open it again")
        where = f"{action} {size_bytes} bytes of {self.path} at offset {offset}"
        if error.errno in _FULL:
            return StorageFullError(f"no room while {where} ({error.strerror}): free that much space and try again")
        return StateError(f"{where} failed ({error.strerror}): check the drive (dmesg, smartctl) and the file")


def _unlock_and_close(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone does not, while somebody has a copy of the descriptor
    os.close(fd)


def _close_in_child() -> None:
    for file in list(_open_files):
        file._forget()


_open_files: "weakref.WeakSet[DirectFile]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


def _name_error(path: Path) -> StateError:
    return StateError(f"{path} must stay the file that was opened, but another process replaces it: try again")


def partial_of(path: Path) -> Path:
    """The name of a file until it is complete."""
    return path.with_name(path.name + ".partial")


def flush_directory(path: Path) -> None:
    """Make names that were given or taken in a directory durable. Raises StateError."""
    try:
        flush_folder(path)
    except OSError as error:
        raise StateError(f"flushing the directory {path} failed ({error.strerror}): check the drive") from error
