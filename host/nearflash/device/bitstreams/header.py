"""The header of a .bit file: for which part it is, and how long what follows must be.

Source: the layout that AMD's tools write and that open tools read: five fields, each with a letter and a length.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nearflash.abi.errors import BitstreamError
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["BitHeader", "read_header", "rename_design"]

_START = bytes.fromhex("0009 0ff00ff00ff00ff000 0001")
_TEXTS = "abcd"
_NO_DATE, _NO_TIME = "2000/01/01", "00:00:00"


@dataclass(frozen=True)
class BitHeader:
    """What a .bit file states of itself."""

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


def rename_design(path: Path, design: str) -> None:
    """Give a .bit file the name of its design, and no date: equal designs then have equal files.

    Raises BitstreamError as `read_header`.
    """
    header = read_header(path)
    content = path.read_bytes()
    payload = content[len(content) - header.payload_bytes :]
    renamed = replace(header, design=design, date=_NO_DATE, time=_NO_TIME).to_bytes()
    write_durably(path, renamed + payload, mode=PUBLIC_MODE)
