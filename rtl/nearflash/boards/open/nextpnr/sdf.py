"""SDF files as prjxray's `timings/*.sdf`: delays and checks of cells, in ps.

A delay has two pairs of numbers, least and most: at the fast corner and at the slow one. A check has one pair.

Source: IEEE 1497-2001 (SDF).
"""

import re
from dataclasses import dataclass, field

__all__ = ["Entry", "SdfCell", "read_cells"]

_LINE = re.compile(
    r'\(CELLTYPE "(?P<kind>[^"]*)"|\(INSTANCE (?P<instance>[^)\s]*)'
    r"|\((?P<path>IOPATH|INTERCONNECT) (?P<source>\w+) (?P<target>\w+) (?P<delays>\([^)]*\) *\([^)]*\))"
    r"|\((?P<check>SETUP|HOLD|RECOVERY|REMOVAL) (?P<pin>\w+) \(posedge (?P<clock>\w+)\) (?P<limit>\([^)]*\))"
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Entry:
    """A delay (IOPATH, INTERCONNECT) or a check of a pin against a clock (SETUP, HOLD, RECOVERY, REMOVAL), ps."""

    kind: str
    source: str
    """Of a check the pin."""
    target: str
    """Of a check the clock."""
    numbers: tuple[int, ...]

    @property
    def least(self) -> int:
        """The smallest number, of both corners."""
        return min(self.numbers)

    @property
    def most(self) -> int:
        """The largest number, of both corners."""
        return max(self.numbers)


@dataclass(frozen=True)
class SdfCell:
    """A cell of a file: its type, which has its parameters, where it is, and what is known of it."""

    kind: str
    instance: str = ""
    entries: list[Entry] = field(default_factory=list)


def read_cells(text: str) -> list[SdfCell]:
    """The cells of a file in ns, in order."""
    cells: list[SdfCell] = []
    for found in _LINE.finditer(text):
        if found["kind"] is not None:
            cells.append(SdfCell(found["kind"]))
        elif found["instance"] is not None:
            cells[-1] = SdfCell(cells[-1].kind, found["instance"], cells[-1].entries)
        elif found["path"]:
            cells[-1].entries.append(Entry(found["path"], found["source"], found["target"], _ps(found["delays"])))
        else:
            cells[-1].entries.append(Entry(found["check"], found["pin"], found["clock"], _ps(found["limit"])))
    return cells


def _ps(numbers: str) -> tuple[int, ...]:
    return tuple(round(float(number) * 1000) for number in _NUMBER.findall(numbers))
