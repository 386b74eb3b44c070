"""The header of a .bit file: for which part it is, and how long what follows must be.

Source: the layout that AMD's tools write and that open tools read: five fields, each with a letter and a length.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from nearflash.abi.errors import BitstreamError
from nearflash.support.files import PUBLIC_MODE, read_bytes, write_durably

__all__ = ["BitHeader", "Label", "rename_design", "split_bit"]

_START = bytes.fromhex("0009 0ff00ff00ff00ff000 0001")
_TEXTS = "abcd"
_NO_DATE, _NO_TIME = "2000/01/01", "00:00:00"


@dataclass(frozen=True)
class BitHeader:
    """Header of a .bit file."""

    design: str
    part: str
    date: str
    time: str
    payload_bytes: int
    """Bytes of configuration data: all that follows the header."""

    def to_bytes(self) -> bytes:
        """The header, up to the configuration data."""
        texts = (self.design, self.part, self.date, self.time)
        fields = (letter.encode() + (len(text) + 1).to_bytes(2, "big") + text.encode("latin-1") + b"\0"
                  for letter, text in zip(_TEXTS, texts, strict=True))  # fmt: skip
        return _START + b"".join(fields) + b"e" + self.payload_bytes.to_bytes(4, "big")


def split_bit(path: Path) -> tuple[BitHeader, bytes]:
    """Read header and configuration data of a .bit file.

    Raises BitstreamError for a file that has no header, or is not as long as it states.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        raise BitstreamError(f"{path} must be a readable .bit file: {error.strerror}") from error
    if not content.startswith(_START):
        raise BitstreamError(f"{path} must be a .bit file, not one that begins {content[:4].hex() or 'with nothing'}")
    at, texts = len(_START), list[str]()
    for letter in _TEXTS:
        length = int.from_bytes(content[at + 1 : at + 3], "big")
        text = content[at + 3 : at + 3 + length]
        if content[at : at + 1] != letter.encode() or len(text) != length:
            raise BitstreamError(f"{path} must have a field {letter!r} at byte {at}, not {content[at : at + 1]!r}")
        texts.append(text.rstrip(b"\0").decode("latin-1"))
        at += 3 + length
    stated, payload_bytes = int.from_bytes(content[at + 1 : at + 5], "big"), len(content) - at - 5
    if content[at : at + 1] != b"e" or stated != payload_bytes:
        raise BitstreamError(f"{path} must have {stated} bytes of data behind its header, not {max(payload_bytes, 0)}")
    design, part, date, time = texts
    return BitHeader(design, part, date, time, stated), content[at + 5 :]


def rename_design(path: Path, design: str) -> None:
    """Give a .bit file the name of its design, and no date: equal designs then have equal files.

    Raises BitstreamError as `split_bit`.
    """
    header, payload = split_bit(path)
    _write(path, replace(header, design=design), payload)


def _write(path: Path, header: BitHeader, payload: bytes) -> None:
    write_durably(path, replace(header, date=_NO_DATE, time=_NO_TIME).to_bytes() + payload, mode=PUBLIC_MODE)


@dataclass(frozen=True)
class Label:
    """Whose bits a .bit file has, in the text of its design: `update;CONFIG=…;DIGEST=…;DESIGN=…;BITS=…`.

    Tools add their own entries to that text in the same form, and readers pass over those that they do not know. BITS
    is the SHA-256 of the configuration data, so that a label is of its own bits alone.
    """

    kernel: str
    config: str
    digest: str
    """Of the configuration, as in the manifest."""
    design: str
    """Of the design that was built, as in the manifest."""

    def text(self, payload: bytes) -> str:
        """The design's text for this configuration data."""
        bits = hashlib.sha256(payload).hexdigest()
        return f"{self.kernel};CONFIG={self.config};DIGEST={self.digest};DESIGN={self.design};BITS={bits}"

    def write(self, source: Path, path: Path) -> None:
        """Write a .bit file with this label and without a date: equal designs then have equal files.

        Raises BitstreamError as `split_bit` of the source.
        """
        header, payload = split_bit(source)
        _write(path, replace(header, design=self.text(payload)), payload)

    def check(self, header: BitHeader, payload: bytes, path: Path) -> None:
        """Raise BitstreamError, naming what differs, for the header and data of another build."""
        wanted, design = (text.split(";") for text in (self.text(payload), header.design))
        if wanted == design:
            return
        differs = next((part for part in wanted if part not in design), wanted[0])
        raise BitstreamError(
            f"{path} must have the label of its build, {differs[:60]!r}, not {header.design[:120]!r}: it is another "
            "build's, or its bits were changed; build it again"
        )
