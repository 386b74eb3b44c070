"""FASM, the FPGA assembly: one feature a line, `TILE.FEATURE`, `TILE.FEATURE[5]` or `TILE.FEATURE[7:0] = 8'h3c`.

Source: the FASM specification of the F4PGA project (grammar of lines, values and annotations).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nearflash.abi.errors import FormatError

__all__ = ["Feature", "parse"]

_LINE = re.compile(r"(?P<tile>\w+)\.(?P<name>[\w.]+)(?:\[(?P<high>\d+)(?::(?P<low>\d+))?\])?(?:\s*=\s*(?P<value>\S+))?")
_VALUE = re.compile(r"(?:(?P<width>\d+)?'(?P<base>[bodh]))?(?P<digits>[0-9a-fA-F_]+)")
_BASES = {"b": 2, "o": 8, "d": 10, "h": 16, None: 10}


@dataclass(frozen=True)
class Feature:
    """One bit of configuration that is set: `index` is its place where the feature has several, else None."""

    tile: str
    name: str
    index: int | None = None

    def __str__(self) -> str:
        return f"{self.tile}.{self.name}" + ("" if self.index is None else f"[{self.index}]")


def parse(lines: Iterable[str]) -> Iterator[Feature]:
    """The features that are set; those whose value is 0 are left out, as FASM's default is 0.

    Raises FormatError, with the line's number, for a line that is not FASM or a value that does not fit its bits.
    """
    for number, line in enumerate(lines, 1):
        text = re.sub(r"#.*|\{.*?\}", "", line).strip()
        if text:
            yield from _features(text, number)


def _features(text: str, number: int) -> Iterator[Feature]:
    found = _LINE.fullmatch(text)
    value = 1 if found is None or found["value"] is None else _value(found["value"])
    if found is None or value is None:
        raise FormatError(f"line {number} must be a FASM feature, not {text!r}")
    if found["high"] is None:
        low, width = None, 1
    else:
        low = int(found["low"] or found["high"])
        width = int(found["high"]) - low + 1
    if width < 1 or value >> width:
        raise FormatError(f"line {number} must have a value of {width} bits, not {text!r}")
    for place in range(width):
        if value >> place & 1:
            yield Feature(found["tile"], found["name"], None if low is None else low + place)


def _value(text: str) -> int | None:
    found = _VALUE.fullmatch(text)
    try:
        return int(found["digits"].replace("_", ""), _BASES[found["base"]]) if found else None
    except ValueError:
        return None
