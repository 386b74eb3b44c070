"""Delays of hard blocks that nextpnr's chip database leaves out: of DSP slices and of the processor block.

Without them nextpnr times no path that begins, ends or passes there. prjxray's database has them, by the blocks'
parameters. In nextpnr's, all blocks of a kind share one table, so the largest delay of all blocks of the design counts
for each of them: a path may look longer than it is, none shorter. Paths inside a slice, from register to register, are
left out.

Source: IEEE 1497-2001 (SDF); prjxray's `timings/DSP_L.sdf` and `PSS2.sdf` (slow corner, largest values).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BlockDelays", "dsp_delays", "dsp_parameters", "processor_delays"]

_LINE = re.compile(
    r'\(CELLTYPE "(?P<kind>[^"]*)"|\(IOPATH (?P<source>\w+) (?P<target>\w+) (?P<delay>\([^)]*\) *\([^)]*\))'
    r"|\(SETUP (?P<pin>\w+) \(posedge (?P<clock>\w+)\) (?P<limit>\([^)]*\))"
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_PARAMETER = re.compile(r"_?([A-Z]+REG|[AB]_INPUT|USE_(?:DPORT|MULT|PATTERN_DETECT))_(NO_PATDET|[A-Z0-9]+)")
_DEFAULTS = {"A_INPUT": "DIRECT", "B_INPUT": "DIRECT", "USE_DPORT": "FALSE", "USE_MULT": "MULTIPLY",
             "USE_PATTERN_DETECT": "NO_PATDET"}  # fmt: skip
"""Parameters of a DSP48E1 where a netlist says nothing (AMD UG479); of numbers of registers, 1."""


@dataclass(frozen=True)
class BlockDelays:
    """Delays of a kind of block, ps, between pins; all pins of a bus have the bus's name."""

    paths: dict[tuple[str, str], int] = field(default_factory=dict)
    """From an input to an output."""
    setups: dict[tuple[str, str], int] = field(default_factory=dict)
    """Of an input before the edge of a clock."""
    launches: dict[tuple[str, str], int] = field(default_factory=dict)
    """From the edge of a clock to an output."""

    def add(self, other: "BlockDelays") -> None:
        """Take in another block's delays; of two for the same pins the larger one counts."""
        for mine, theirs in ((self.paths, other.paths), (self.setups, other.setups), (self.launches, other.launches)):
            mine |= {pins: max(delay, mine.get(pins, delay)) for pins, delay in theirs.items()}


def processor_delays(sdf: str) -> BlockDelays:
    """Delays of a processor block, from the text of its SDF file."""
    found = BlockDelays()
    for _, delays in _blocks(sdf):
        found.add(delays)
    return found


def dsp_delays(sdf: str, slices: Iterable[Mapping[str, str]]) -> BlockDelays:
    """Delays of DSP slices of these parameters, from the text of their SDF file."""
    found = BlockDelays()
    blocks = [(dict(_PARAMETER.findall(kind.removeprefix("DSP48E1"))), delays) for kind, delays in _blocks(sdf)]
    for parameters in {tuple(sorted(each.items())): each for each in slices}.values():
        for wanted, delays in blocks:
            if all(parameters.get(name, _DEFAULTS.get(name, "1")) == value for name, value in wanted.items()):
                found.add(delays)
    return found


def dsp_parameters(cells: Mapping[str, Any]) -> list[dict[str, str]]:
    """Parameters of the DSP slices among a netlist's cells (yosys' JSON), as SDF files spell them."""
    return [
        {name: str(int(text, 2)) if set(text) <= set("01") else text.strip()
         for name, text in cell.get("parameters", {}).items()}
        for cell in cells.values() if cell["type"] == "DSP48E1"
    ]  # fmt: skip


def _blocks(sdf: str) -> Iterator[tuple[str, BlockDelays]]:
    """Name and delays of each cell of an SDF file in ns; the last number of each triple counts, the larger triple."""
    kind, delays = "", BlockDelays()
    for found in _LINE.finditer(sdf):
        if found["kind"] is not None:
            yield kind, delays
            kind, delays = found["kind"], BlockDelays()
        elif found["pin"]:
            delays.setups[found["pin"], found["clock"]] = _ps(found["limit"])
        else:
            ends = delays.launches if found["source"].endswith("CLK") else delays.paths
            ends[found["source"], found["target"]] = max(map(_ps, found["delay"].split(")")[:2]))
    yield kind, delays


def _ps(triple: str) -> int:
    return round(float(_NUMBER.findall(triple)[-1]) * 1000)
