"""Frames over two pipes: a request and its response, each a JSON object with bytes behind it.

A frame is `NFD1`, the length of the JSON text and that of the bytes (each 32 bits, big endian), the text, the bytes.
Lengths have bounds that are compared before anything is read; nothing but JSON is interpreted. What lies between the
two machines, and who may speak, is ssh's matter.
"""

import json
import struct
from typing import IO, Any, TypeAlias

from nearflash.abi.errors import DeviceError, DeviceLostError

__all__ = ["MAX_PAYLOAD_BYTES", "FrameChannel", "Json", "take_integer"]

Json: TypeAlias = dict[str, Any]
MAX_PAYLOAD_BYTES = 4 << 20
"""Of the bytes behind a JSON text: longer transfers are several requests."""
_MAX_TEXT_BYTES = 16 << 20
_START = struct.Struct(">4sII")
_MAGIC = b"NFD1"
_SHOWN_BYTES = 40


class FrameChannel:
    """One end. `peer` names the other one in messages."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes], peer: str) -> None:
        self._reader, self._writer, self._peer = reader, writer, peer

    def send(self, body: Json, payload: bytes | memoryview = b"") -> None:
        """Send a frame. Raises DeviceLostError where nobody reads any more, DeviceError for one past the bounds."""
        text = json.dumps(body).encode("ascii")
        if len(text) > _MAX_TEXT_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
            raise DeviceError(
                f"a frame must have at most {_MAX_TEXT_BYTES} bytes of text and {MAX_PAYLOAD_BYTES} of data, not "
                f"{len(text)} and {len(payload)}: split the command"
            )
        try:
            self._writer.write(_START.pack(_MAGIC, len(text), len(payload)))
            self._writer.write(text)
            self._writer.write(payload)
            self._writer.flush()
        except (OSError, ValueError) as closed:  # ValueError: this end is closed
            raise self._make_error() from closed

    def receive(self) -> tuple[Json, bytes]:
        """The next frame. Raises DeviceLostError at the end, DeviceError for what is no frame."""
        start = self._read(_START.size)
        magic, text_bytes, payload_bytes = _START.unpack(start)
        if magic != _MAGIC:
            raise DeviceError(
                f"{self._peer} must speak frames, not {start!r}: perhaps its shell prints something at log-in"
            )
        if text_bytes > _MAX_TEXT_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise DeviceError(f"{self._peer} must keep frames in bounds, not send {text_bytes} + {payload_bytes} bytes")
        try:
            body = json.loads(self._read(text_bytes))
        except (ValueError, RecursionError) as error:
            raise DeviceError(f"{self._peer} must send JSON: {error}") from error
        if type(body) is not dict:
            raise DeviceError(f"{self._peer} must send a JSON object, not {str(body)[:_SHOWN_BYTES]!r}")
        return body, self._read(payload_bytes)

    def _read(self, size_bytes: int) -> bytes:
        try:
            found = self._reader.read(size_bytes)
        except (OSError, ValueError) as closed:
            raise self._make_error() from closed
        if len(found) != size_bytes:
            raise self._make_error()
        return found

    def _make_error(self) -> DeviceLostError:
        return DeviceLostError(
            f"{self._peer} must answer, not end: see the messages above; state on flash is that of the last commit"
        )


def take_integer(body: Json, name: str, most: int = (1 << 64) - 1) -> int:
    """An integer of a frame. Raises DeviceError for anything but one from 0 to `most`."""
    value = body.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise DeviceError(f"{name} of a frame must be an integer from 0 to {most}, not {str(value)[:_SHOWN_BYTES]!r}")
    return value
