"""Delays of slices that nextpnr's chip database has none of, or one stub for all: from prjxray's database.

- of each input pin of a LUT (0 to 540 ps; 20 ps in nextpnr's database), so that routing takes the fast ones, A6 and A5;
- of the multiplexers between the slice's parts (a pin AX to its flip-flop 225 ps, a LUT to AMUX 213 ps);
- clock to output of LUTs that are memories or shift registers, setup of their write ports;
- clock to output and setup of flip-flops; carry chains with their inputs DI.

A value is the largest of both kinds of slice (SLICEL, SLICEM), of both kinds of memory in a LUT, and of both loads that
prjxray distinguishes (AFF and AFFL): nextpnr has one table for each type of cell.

Source: prjxray's `timings/slicel.sdf`, `slicem.sdf` and `tile_type_CLB*.json`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nearflash.boards.open.nextpnr.sdf import SdfCell, read_cells
from nearflash.boards.open.nextpnr.timing import BlockDelays

__all__ = ["SliceDelays", "slice_delays"]

_LUT_KINDS = ("LUT5", "LUT6", "LUT_OR_MEM")
_FF_KINDS = ("REG_INIT_FF", "FF_INIT")
#: What SDF files call a pin of a cell, and the wire at it in nextpnr's chip database.
_LUT_WIRES = {
    "O5": "A5LUT_O5", "O6": "A6LUT_O6", "MC31": "A6LUT_MC31", "DI1": "ADI1MUX_OUT", "DI2": "AX", "WE": "WEMUX_OUT",
    **{f"WA{at}": f"D{at}" for at in range(1, 7)}, "WA7": "WA7USED_OUT", "WA8": "WA8USED_OUT",
}  # fmt: skip
_FF_WIRES = {"DIN": "AFFMUX_OUT", "CE": "CEUSEDMUX_OUT", "SR": "SRUSEDMUX_OUT", "Q": "AQ"}
_CARRY_WIRES = {
    "CYINIT": "PRECYINIT_OUT",
    **{f"DI{at}": f"{letter}CY0_OUT" for at, letter in enumerate("ABCD")},
    **{f"S{at}": f"{letter}6LUT_O6" for at, letter in enumerate("ABCD")},
    **{f"{pin}{at}": f"CARRY4_{pin}{at}" for pin in ("CO", "O") for at in range(4)},
}
#: Parts of a slice: a flip-flop's or an output's multiplexer (the L is of another load), others.
_MULTIPLEXER = re.compile(r"(?P<part>[A-D](?:5?FF|MUX))L?[12]?")
_CONTROL = {"ce": ("CE", "CEUSEDMUX_OUT"), "sr": ("SR", "SRUSEDMUX_OUT")}
_PARTS = {"CLKINV": "CLKINV_OUT", "COUT": "COUT", **{f"{each}CY0": f"{each}CY0_OUT" for each in "ABCD"},
          **{each: each for each in "ABCD"}}  # fmt: skip


@dataclass(frozen=True)
class SliceDelays:
    """Delays of slices, ps. Empty: nextpnr's stay."""

    pins: Mapping[str, int] = field(default_factory=dict)
    """From a wire of the tile (`CLBLM_M_A1`) through the LUT's pin at it."""
    inside: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """From a wire of the site to another one (`AX`, `AFFMUX_OUT`)."""
    tables: Mapping[tuple[str, ...], BlockDelays] = field(default_factory=dict)
    """Of a cell, by the names of its places in a slice (`A6LUT`, `A5LUT`); pins by the names of the wires at them."""
    through: int = 0
    """From a LUT's pin to its output O6."""


def slice_delays(sdf_texts: Collection[str], pins: Mapping[str, int]) -> SliceDelays:
    """Delays of slices from the texts of SDF files (empty ones: none), and of the tiles' wires at LUT inputs, ps."""
    cells = [cell for text in sdf_texts for cell in read_cells(text)]
    if not cells:
        return SliceDelays()
    inside: dict[tuple[str, str], int] = {}
    for cell in cells:
        for entry in cell.entries if cell.kind == "ROUTING_BEL" else ():
            if ends := _wires_inside(cell.instance.rpartition("/")[2], entry.source):
                inside[ends] = max(entry.most, inside.get(ends, 0))
    luts = [cell for cell in cells if cell.kind.startswith(_LUT_KINDS)]
    registers = [cell for cell in cells if cell.kind.startswith(_FF_KINDS)]
    carries = [cell for cell in cells if cell.kind in ("CARRY4", "CARRY4_O5")]
    lut = _table(luts, _LUT_WIRES)
    tables = {
        ("A6LUT", "A5LUT"): lut, ("AFF",): _table(registers, _FF_WIRES), ("CARRY4",): _table(carries, _CARRY_WIRES)
    }  # fmt: skip
    through = max(delay for (_, output), delay in lut.paths.items() if output == _LUT_WIRES["O6"])
    return SliceDelays(pins, inside, tables, through)


def _wires_inside(part: str, source: str) -> tuple[str, str] | None:
    """nextpnr's wires from `source` to a part of a slice as SDF files name them; None where it has no such wires."""
    multiplexer = _MULTIPLEXER.fullmatch(part)
    if source in ("o5", "o6") or (source.startswith("clk") and part != "CLKINV"):
        return None  # o5 and o6 are the LUTs' outputs again, with smaller values
    if multiplexer is None:
        target = _PARTS.get(part)
    elif source in _CONTROL:
        return _CONTROL[source]
    else:
        target = multiplexer["part"] + ("MUX_OUT" if multiplexer["part"].endswith("FF") else "")
    shifted = source == "a6lut" and part.startswith("D")  # the end of a shift register in LUT A
    endings = {"5lut": "_O5", "6lut": "_MC31" if shifted else "_O6", "5ff": "_Q", "amux": "_OUT", "bmux": "_OUT",
               "8mux": "_OUT"}  # fmt: skip
    ending = next((endings[each] for each in endings if source.endswith(each)), "")
    return None if target is None else (source.upper() + ending, target)


def _table(cells: list[SdfCell], wires: Mapping[str, str]) -> BlockDelays:
    """One table for cells of a type: the largest values. The recovery time of a reset stands for its setup."""
    found = BlockDelays()
    for cell in cells:
        for entry in cell.entries:
            source, target = (wires.get(name, name) for name in (entry.source, entry.target))
            if entry.kind in ("SETUP", "RECOVERY"):
                found.add(BlockDelays(setups={(source, target): entry.most}))
            elif entry.kind == "IOPATH" and entry.source == "CLK":
                found.add(BlockDelays(launches={(source, target): entry.most}))
            elif entry.kind == "IOPATH" and entry.source != "SR":
                found.add(BlockDelays(paths={(source, target): entry.most}))
    return found
