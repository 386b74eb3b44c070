"""Delays of hard blocks that nextpnr's chip database leaves out: of DSP slices and of the processor block.

Without them nextpnr times no path that begins, ends or passes there. prjxray's database has them, by the blocks'
parameters: a slice without registers has paths from its inputs to its outputs, one with registers has none. nextpnr has
one table for each type of a netlist's cells, so the slices get one type for each set of parameters. Paths inside a
slice, from register to register, are left out.

Source: prjxray's `timings/DSP_L.sdf` and `PSS2.sdf` (slow corner, largest values).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nearflash.boards.open.nextpnr.sdf import SdfCell, read_cells

__all__ = ["BlockDelays", "assign_types", "block_of", "dsp_cells", "dsp_delays", "dsp_parameters", "processor_delays"]

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


def assign_types(cells: Mapping[str, Any], dsp_sdf: str, processor_sdf: str) -> dict[str, BlockDelays]:
    """Give the hard blocks among a netlist's cells (yosys' JSON) types that tell their delays; returns these by type.

    A type is the block's with a number, `DSP48E1_0`: one for all slices whose delays are by the same parameters.
    dsp_sdf, processor_sdf: text of the SDF file of each; empty where there is none: no delays.
    """
    timed = {name for cell in read_cells(dsp_sdf) for name, _ in _list_parameters(cell.kind)}
    types: dict[frozenset[tuple[str, str]], str] = {}
    delays = {}
    for cell in cells.values():
        if cell["type"] == "DSP48E1":
            parameters = {name: value for name, value in dsp_parameters(cell).items() if name in timed}
            key = frozenset(parameters.items())
            if key not in types:
                types[key] = f"DSP48E1_{len(types)}"
                delays[types[key]] = dsp_delays(dsp_sdf, parameters)
            cell["type"] = types[key]
        elif cell["type"] == "PS7":
            cell["type"] = "PS7_0"
            delays["PS7_0"] = processor_delays(processor_sdf)
    return delays


def block_of(timed_type: str) -> str:
    """The block's own type (`DSP48E1`) of one that `assign_types` gave."""
    return timed_type.rpartition("_")[0]


def processor_delays(sdf: str) -> BlockDelays:
    """Delays of a processor block, from the text of its SDF file."""
    found = BlockDelays()
    for cell in read_cells(sdf):
        found.add(_delays(cell))
    return found


def dsp_delays(sdf: str, parameters: Mapping[str, str]) -> BlockDelays:
    """Delays of a DSP slice of these parameters, from the text of its SDF file.

    Of two values that the file gives for one parameter, either counts.
    """
    found = BlockDelays()
    for cell in dsp_cells(sdf, parameters):
        found.add(_delays(cell))
    return found


def dsp_cells(sdf: str, parameters: Mapping[str, str]) -> list[SdfCell]:
    """The cells of a DSP slice's SDF file that are of these parameters."""
    return [
        cell for cell in read_cells(sdf)
        if all((name, parameters.get(name, _DEFAULTS.get(name, "1"))) in wanted
               for wanted in [_list_parameters(cell.kind)] for name, _ in wanted)
    ]  # fmt: skip


def dsp_parameters(cell: Mapping[str, Any]) -> dict[str, str]:
    """Parameters of a DSP slice of a netlist (yosys' JSON), as SDF files spell them."""
    return {
        name: str(int(text, 2)) if set(text) <= set("01") else text.strip()
        for name, text in cell.get("parameters", {}).items()
    }


def _list_parameters(kind: str) -> set[tuple[str, str]]:
    """Names and values of the parameters that the name of a DSP slice in an SDF file has."""
    return set(_PARAMETER.findall(kind.removeprefix("DSP48E1")))


def _delays(cell: SdfCell) -> BlockDelays:
    """Delays of a cell of an SDF file; the largest number of each counts."""
    delays = BlockDelays()
    for entry in cell.entries:
        if entry.kind == "SETUP":
            delays.setups[entry.source, entry.target] = entry.most
        elif entry.kind == "IOPATH":
            ends = delays.launches if entry.source.endswith("CLK") else delays.paths
            ends[entry.source, entry.target] = entry.most
    return delays
