"""The board's logic as a file: one process at a time holds it, and the file says which bitstream was loaded last.

It lies where a restart of the board empties it, as a restart empties the logic.
"""

import fcntl
import os
from pathlib import Path

from nearflash.abi.errors import DeviceError
from nearflash.support.files import open_regular

__all__ = ["BoardLock"]

_MAX_BYTES = 4096


class BoardLock:
    """An open lock file, held by this process until `close`.

    Raises DeviceError where another process holds it, which it names, and where this user may not.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise DeviceError(f"{path} must be opened by root, not fail ({error.strerror}): use `sudo`") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = self._read()[0]
            os.close(self._file)
            raise DeviceError(
                f"the board's logic must be held by one process, and process {holder or 'unknown'} has it: end that "
                f"one, or wait for it ({path})"
            ) from None
        self._write(self.loaded)

    @property
    def loaded(self) -> str:
        """Name of the bitstream that was loaded last, as it was kept; empty where none was since the board started."""
        return self._read()[1]

    def note_loaded(self, name: str) -> None:
        """Keep the name of the bitstream that is loaded; empty: it is not known which."""
        self._write(name)

    def close(self) -> None:
        """Let others have the board."""
        os.close(self._file)

    def _read(self) -> list[str]:
        lines = os.pread(self._file, _MAX_BYTES, 0).decode("utf-8", "replace").splitlines()
        return [*lines, "", ""][:2]

    def _write(self, loaded: str) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n{loaded}\n".encode(), 0)
