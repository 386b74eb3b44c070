"""A batch list's results: a file of JSON lines, written as texts are finished, from which a later run goes on.

    {"nearflash_results": 2, "settings": {…}}
    {"prompt": 0, "digest": "…", "tokens": […], "text": "…", "crc32": …}

A line's checksum covers the first line before it: a line of other results, of the same prompt, does not hold here.
Lines are durable before a block's end is reported; mode 0600. A last line without its end, from a kill, is removed.
"""

import errno
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearflash.abi.errors import StateError, StorageFullError
from nearflash.storage.io.direct import flush_directory
from nearflash.support.closing import Closing
from nearflash.support.files import open_regular
from nearflash.support.tables import check_fields, check_integers

__all__ = ["Results", "prompt_digest"]

_VERSION = 2
_SMALL_BYTES = 1 << 24
"""More are read only of a file that begins as these results do."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def prompt_digest(tokens: Sequence[int]) -> str:
    """The digest of a prompt's tokens, 32 hexadecimal digits of SHA-256."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:32]


class Results(Closing):
    """A file of results, locked. Close it, or use it as a context manager.

    digests: of all prompts. settings: what texts depend on beside them. Raises StateError where the file is damaged,
    another program's, or of other prompts or settings; it is not changed then.
    """

    def __init__(self, path: Path, digests: Sequence[str], settings: Mapping[str, Any]) -> None:
        self.path = path
        self.done: dict[int, tuple[list[int], str]] = {}
        """Tokens and text of each prompt that is finished."""
        self._digests = digests
        header = json.dumps({"nearflash_results": _VERSION, "settings": dict(settings)}, sort_keys=True)
        self._seed = zlib.crc32(header.encode())
        try:
            self._fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            why = f"({error.strerror}): check path and permissions"
            raise StateError(f"results {path} cannot be opened {why}") from error
        try:
            self._lock()
            data = self._read(header.encode())
            complete = data[: data.rfind(b"\n") + 1]
            if not complete and data and not header.encode().startswith(data):
                raise self._foreign("it has no line that ends")
            self._check(complete, header)
            self._size = len(complete)
            if len(data) != len(complete):
                os.ftruncate(self._fd, self._size)
            if not complete:
                self._append(header)
                flush_directory(path.parent)
        except BaseException:
            os.close(self._fd)
            raise

    def add(self, results: Mapping[int, tuple[Sequence[int], str]]) -> None:
        """Write results by prompt; durable when it returns. Raises StorageFullError, StateError: none is kept."""
        lines = []
        for prompt, (tokens, text) in results.items():
            body = {"prompt": prompt, "digest": self._digests[prompt], "tokens": list(tokens), "text": text}
            lines.append(json.dumps({**body, "crc32": self._checksum(body)}))
        if lines:
            self._append("\n".join(lines))
            self.done.update({prompt: (list(tokens), text) for prompt, (tokens, text) in results.items()})

    def close(self) -> None:
        """Close and unlock it; once."""
        os.close(self._fd)

    def _append(self, text: str) -> None:
        data, done = text.encode() + b"\n", 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._size + done)
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            where = f"writing {len(data)} bytes of results to {self.path}"
            if error.errno in _FULL:
                raise StorageFullError(f"no room while {where} ({error.strerror}): free some and run again") from error
            raise StateError(f"{where} failed ({error.strerror}): check the drive, and run again") from error
        self._size += len(data)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = "are in use by another process: wait for it, or name another file"
            raise StateError(f"results {self.path} {why}") from error

    def _read(self, header: bytes) -> bytes:
        size = os.fstat(self._fd).st_size
        if size > _SMALL_BYTES and os.pread(self._fd, len(header), 0) != header:
            raise self._foreign("its first line has other settings, or is another program's")
        data = bytearray()
        while part := os.pread(self._fd, size - len(data), len(data)):
            data += part
        return bytes(data)

    def _check(self, complete: bytes, header: str) -> None:
        for number, line in enumerate(complete.splitlines()):
            if number == 0:
                if line.decode(errors="replace") != header:
                    raise self._foreign(_difference(line, header))
                continue
            what = f"line {number + 1} of the results {self.path}"
            try:
                body = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise StateError(f"{what} is damaged ({error}): remove it, or name another file") from error
            kinds = {"prompt": int, "digest": str, "tokens": list, "text": str, "crc32": int}
            prompt, digest, tokens, text, checksum = check_fields(what, body, **kinds)
            if checksum != self._checksum({key: body[key] for key in ("prompt", "digest", "tokens", "text")}):
                raise StateError(f"{what} is damaged: its checksum is another; remove it, or name another file")
            if prompt >= len(self._digests) or self._digests[prompt] != digest:
                raise self._foreign(f"line {number + 1} is of another prompt {prompt}")
            self.done[prompt] = check_integers(what, tokens), text

    def _checksum(self, body: Mapping[str, Any]) -> int:
        return zlib.crc32(json.dumps(body, sort_keys=True).encode(), self._seed)

    def _foreign(self, why: str) -> StateError:
        return StateError(f"results {self.path} must be of these prompts and settings, but {why}: name another file")


def _difference(line: bytes, header: str) -> str:
    """Name the settings of a first line that are others than in `header`."""
    try:
        theirs, ours = ({**settings, **settings.get("generation", {})} for settings in
                      (json.loads(text)["settings"] for text in (line, header)))  # fmt: skip
        theirs.pop("generation", None), ours.pop("generation", None)
        names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = []
    return f"its first line has another {', '.join(names)}" if names else "its first line is another program's"
