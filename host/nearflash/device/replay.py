"""Devices recorded and played back: a run on a board becomes a text file that replays without the board.

A transcript is JSON lines: a header (magic, version, generator, build digest), then one line a call: what was asked,
and what came back or was raised. Each line ends with the CRC-32 of the line before it and of its own rest. Bytes sent
to the device are kept as SHA-256, bytes from it as they are, in base64 of zlib.
"""

import base64
import hashlib
import json
import os
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nearflash.abi import ABI_VERSION
from nearflash.abi.errors import CommandError, DigestError, NearflashError, ReplayError, UnknownDeviceError
from nearflash.abi.kernel.commands import Command, Completion
from nearflash.abi.kernel.config import config as named_config
from nearflash.abi.python310 import Self
from nearflash.device.base import Buffer, Device, Identity, LinkBytes
from nearflash.device.errors import describe_error, recall_error
from nearflash.device.memory import anonymous
from nearflash.support.files import open_regular, read_text, replace_file
from nearflash.support.release import release

__all__ = ["VARIABLE", "RecordingDevice", "ReplayDevice", "seal_line"]

MAGIC, VERSION = "nearflash-transcript", 3
VARIABLE = "NEARFLASH_REPLAY"
"""Environment variable that names the transcript of device `replay`."""

Json: TypeAlias = dict[str, Any]
_CHECKSUM = "crc32"
_MAX_BYTES = 1 << 32
"""Of a transcript that is replayed."""
_BEGIN = json.dumps({"magic": MAGIC})[:-1].encode("ascii")


def seal_line(line: Json, before: str = "") -> str:
    """A line of a transcript, with its CRC-32, which covers the line before it, too: no other may stand there."""
    checksum = zlib.crc32(json.dumps(line).encode("ascii"), zlib.crc32(before.encode("ascii")))
    return json.dumps(line | {_CHECKSUM: f"{checksum:08x}"})


class _Journal(ABC):
    @abstractmethod
    def call(self, question: Json, do: Callable[[], Json]) -> Json:
        """The answer to a question: what `do` returns, or what the transcript holds."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Nothing more is asked; failed: because the run ended by an exception."""


class _Writer(_Journal):
    def __init__(self, path: Path, identity: Identity) -> None:
        header = {
            "magic": MAGIC,
            "version": VERSION,
            "generator": f"nearflash {release()}, {identity.name}",
            "abi_version": identity.abi_version,
            "config": identity.config.full_name,
            "digest": f"{identity.digest64:016x}",
            "git_revision": identity.git_revision,
            "recording": secrets.token_hex(8),
        }
        try:
            older = _is_transcript(path)
            with replace_file(path, keep_existing=not older) as out:
                out.write((seal_line(header) + "\n").encode("ascii"))
                descriptor = os.dup(out.fileno())  # the file keeps it; the name could be another's by now
        except OSError as error:
            raise CommandError(f"{path} cannot be recorded to ({error.strerror}): choose another place") from error
        self._file = os.fdopen(descriptor, "w", encoding="ascii", buffering=1)
        self._before = seal_line(header)

    def call(self, question: Json, do: Callable[[], Json]) -> Json:
        try:
            answer = do()
        except NearflashError as error:
            self._write({"ask": question, **describe_error(error)})
            raise
        self._write({"ask": question, "answer": answer})
        return answer

    def close(self, *, failed: bool) -> None:
        self._file.close()

    def _write(self, line: Json) -> None:
        self._before = seal_line(line, self._before)
        self._file.write(self._before + "\n")


def _is_transcript(path: Path) -> bool:
    """Whether a file is there, which a new recording may replace: an older one, or an empty one.

    Raises CommandError for any other, OSError.
    """
    if not os.path.lexists(path):
        return False
    if path.is_symlink():
        raise CommandError(f"{path} must be a new file, to record to, not a link: name its target or another place")
    with os.fdopen(open_regular(path), "rb") as file:
        begin = file.read(len(_BEGIN))
    if begin not in (b"", _BEGIN):
        raise CommandError(f"{path} must be a new file or a transcript, to record to: it is another file; name another")
    return True


class _Reader(_Journal):
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._lines = read_text(path, _MAX_BYTES).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ReplayError(f"{VARIABLE} must name a readable transcript, not {str(path)!r}: {error}") from error
        self._next = 0
        self._departure: ReplayError | None = None
        self.header = self._line()
        if self.header.get("magic") != MAGIC or self.header.get("version") != VERSION:
            raise ReplayError(f"{path} must begin as a {MAGIC} of version {VERSION}, not {str(self.header)[:80]}")
        if seal_line(self.header) != self._lines[0]:
            raise ReplayError(f"line 1 of {path} is damaged: its checksum is another; record it again")

    def call(self, question: Json, do: Callable[[], Json]) -> Json:
        number = self._next + 1
        line = self._line()
        if line.get("ask") != question:
            recorded, asked = _brief(line.get("ask", {}), question), _brief(question, line.get("ask", {}))
            raise self._depart(f"line {number} of {self._path} records {recorded}, the run asks {asked}")
        if "error" in line:
            raise self._error(line)
        answer = line.get("answer")
        if type(answer) is not dict:
            raise self._depart(f"line {number} of {self._path} must hold an answer, not {str(answer)[:80]!r}")
        return answer

    def _error(self, line: Json) -> Exception:
        """The recorded error."""
        recorded = line["error"]
        if type(recorded) is not list or [type(part) for part in recorded] != [str, str]:
            return self._depart(f"{self._path} must hold the name and text of an error, not {str(recorded)[:80]!r}")
        return recall_error(line) or ReplayError(": ".join(recorded))

    def close(self, *, failed: bool) -> None:
        if self._next < len(self._lines) and not failed and not self._departure:
            number, op = self._next + 1, self._line().get("ask", {}).get("op")
            raise self._depart(f"line {number} of {self._path} records {op!r}, but the run has ended")

    def _line(self) -> Json:
        if self._departure:
            raise self._departure
        number = self._next + 1
        if self._next == len(self._lines):
            raise self._depart(f"line {number} of {self._path} must exist: the run asks for more")
        try:
            line = json.loads(self._lines[self._next])
        except (ValueError, RecursionError) as error:
            raise self._depart(f"line {number} of {self._path} must be JSON: {error}") from error
        self._next = number
        if not isinstance(line, dict):
            return {}
        checked = {name: value for name, value in line.items() if name != _CHECKSUM}
        if number > 1 and seal_line(checked, self._lines[number - 2]) != self._lines[number - 1]:
            raise self._depart(f"line {number} of {self._path} is damaged: its checksum is another; record it again")
        if number > 1 and type(checked.get("ask")) is not dict:
            raise self._depart(f"line {number} of {self._path} must hold a question")
        return checked

    def _depart(self, message: str) -> ReplayError:
        """The first departure; clean-up that follows it meets the same error, not a later line."""
        self._departure = ReplayError(message)
        return self._departure


def _brief(one: Json, other: Json) -> str:
    """The operation, and what differs from the other question."""
    return json.dumps({k: v for k, v in one.items() if k == "op" or k not in other or v != other[k]})


def _integer(answer: Json, name: str) -> int:
    value = answer.get(name)
    if type(value) is not int:
        raise ReplayError(f"a transcript must record {name} as an integer, not {str(value)[:80]!r}")
    return value


class _TranscribedBuffer(Buffer):
    def __init__(self, journal: _Journal, links: LinkBytes, address: int, size_bytes: int, inner: list[Buffer]) -> None:
        self.address, self.size_bytes = address, size_bytes
        self.inner = inner  # the recorded buffer; none in a replay
        self.host = inner[0].host if inner else anonymous(size_bytes)
        self.p2p = None
        self._journal, self._links = journal, links

    def sync_to_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        span = self.span(offset, size_bytes)
        digest = hashlib.sha256(self.host[span].tobytes()).hexdigest()
        self._journal.call(self._question("to_device", span) | {"sha256": digest}, lambda: self._down(span))
        self._links.to_device += span.stop - span.start

    def sync_from_device(self, offset: int = 0, size_bytes: int | None = None) -> None:
        span = self.span(offset, size_bytes)
        answer = self._journal.call(self._question("from_device", span), lambda: self._up(span))
        try:
            self.host[span] = np.frombuffer(zlib.decompress(base64.b64decode(answer["bytes"])), np.uint8)
        except (KeyError, ValueError, TypeError, zlib.error) as error:
            raise ReplayError(
                f"recorded bytes must be base64 of zlib, {span.stop - span.start} long: {error}"
            ) from error
        self._links.from_device += span.stop - span.start

    def _question(self, op: str, span: slice) -> Json:
        return {"op": op, "address": self.address, "range": [span.start, span.stop]}

    def _down(self, span: slice) -> Json:
        self.inner[0].sync_to_device(span.start, span.stop - span.start)
        return {}

    def _up(self, span: slice) -> Json:
        self.inner[0].sync_from_device(span.start, span.stop - span.start)
        return {"bytes": base64.b64encode(zlib.compress(self.host[span].tobytes())).decode()}


class _TranscribedDevice(Device):
    """Each call is a question to a journal. Buffers have no p2p view: what it moves could not be recorded."""

    _device: Device
    """The recorded device; a replay has none and never asks for it."""

    def __init__(self, identity: Identity, journal: _Journal) -> None:
        self.identity = identity
        self.links = LinkBytes()
        self._journal = journal
        self._open = True

    def allocate(self, size_bytes: int) -> Buffer:
        inner: list[Buffer] = []

        def do() -> Json:
            inner.append(self._device.allocate(size_bytes))
            return {"address": inner[0].address}

        address = _integer(self._journal.call({"op": "allocate", "size_bytes": size_bytes}, do), "address")
        return _TranscribedBuffer(self._journal, self.links, address, size_bytes, inner)

    def free(self, buffer: Buffer) -> None:
        assert isinstance(buffer, _TranscribedBuffer)
        inner = buffer.inner
        self._journal.call({"op": "free", "address": buffer.address}, lambda: self._device.free(inner[0]) or {})

    def submit(self, command: Command) -> int:
        question = {"op": "submit", **command.registers()}
        return _integer(self._journal.call(question, lambda: {"ticket": self._device.submit(command)}), "ticket")

    def wait(self, ticket: int, timeout_s: float = 60.0) -> Completion:
        question = {"op": "wait", "ticket": ticket}
        counters = self._journal.call(question, lambda: self._device.wait(ticket, timeout_s).counters)
        return Completion({name: _integer(counters, name) for name in counters})

    def reset(self) -> None:
        self._journal.call({"op": "reset"}, lambda: self._device.reset() or {})

    def close(self) -> None:
        self._close(failed=False)

    def __exit__(self, *error: object) -> None:
        self._close(failed=error[0] is not None)

    def _close(self, *, failed: bool) -> None:
        if self._open:
            self._open = False
            self._journal.close(failed=failed)


class RecordingDevice(_TranscribedDevice):
    """A device whose calls are also written to a new transcript at `path` (mode 0600); closing it closes the device."""

    def __init__(self, device: Device, path: str | os.PathLike[str]) -> None:
        super().__init__(device.identity, _Writer(Path(path), device.identity))
        self._device = device

    @classmethod
    def open(cls, config: str) -> Self:
        """There is nothing to record: wrap a device that is open."""
        raise UnknownDeviceError("a recording must wrap an open device: RecordingDevice(open_device(...), path)")

    def _close(self, *, failed: bool) -> None:
        super()._close(failed=failed)
        self._device.close()


class ReplayDevice(_TranscribedDevice):
    """The device of a transcript. Any departure from it raises ReplayError, which names the first differing line."""

    QUICK_TO_OPEN = True

    def __init__(self, path: str | os.PathLike[str], config: str) -> None:
        journal = _Reader(Path(path))
        header, build = journal.header, named_config(config)
        expected = {"config": config, "digest": f"{build.digest64:016x}", "abi_version": ABI_VERSION}
        for name, value in expected.items():
            if header.get(name) != value:
                raise DigestError(
                    f"{name} of transcript {path} must be {value}, not {header.get(name)}: "
                    "open the configuration that it was recorded with, or record it again"
                )
        super().__init__(Identity("replay", build, build.digest64, ABI_VERSION, header.get("git_revision", 0)), journal)

    @classmethod
    def open(cls, config: str) -> Self:
        """Play the transcript that NEARFLASH_REPLAY names. Raises UnknownDeviceError, ReplayError, DigestError."""
        path = os.environ.get(VARIABLE)
        if not path:
            raise UnknownDeviceError(
                f"device 'replay:{config}' plays a transcript: set {VARIABLE} to the file that RecordingDevice wrote"
            )
        return cls(path, config)
