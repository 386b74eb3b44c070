"""The header of a .bit file: for which part it is, and how long what follows must be.

Source: the layout that AMD's tools write and that open tools read: five fields, each with a letter and a length.
"""

from dataclasses import dataclass
from pathlib import Path

from nearflash.abi.errors import BitstreamError

__all__ = ["BitHeader", "read_header"]

_START = bytes.fromhex("0009 0ff00ff00ff00ff000 0001")
_TEXTS = "abcd"


@dataclass(frozen=True)
class BitHeader:
    """What a .bit file states of itself."""

    design: str
    part: str
    date: str
    time: str
    payload_bytes: int
    """Bytes of configuration data: all that follows the header."""


def read_header(path: Path) -> BitHeader:
    """The header of a .bit file. Raises BitstreamError for a file that has none, or is not as long as it states."""
    content = path.read_bytes()
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
    stated, found = int.from_bytes(content[at + 1 : at + 5], "big"), len(content) - at - 5
    if content[at : at + 1] != b"e" or stated != found:
        raise BitstreamError(f"{path} must have {stated} bytes of data behind its header, not {max(found, 0)}")
    design, part, date, time = texts
    return BitHeader(design, part, date, time, stated)
