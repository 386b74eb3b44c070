"""Cells by place: what decoded bits and a routed netlist are both turned into, so that they can be compared and run.

A cell's key is its place, `CLBLM_L_X8Y53/SLICE_X0Y0.AFF`. A net is what drives it: `0`, `1`, the key of a cell with one
output, or key and pin (`….DSP48E1:P3`); `?` and a site's pin where nothing does.
"""

import json
import lzma
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nearflash.abi.errors import FormatError

__all__ = ["OPEN", "Cell", "View", "collect", "fold_inversions", "key_of", "load_view", "make_lut", "save_view"]

OPEN = "?"
"""The first character of a net that nothing drives."""


@dataclass(frozen=True)
class Cell:
    """A BEL in use: what it is, how it is configured, and the nets at its inputs."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)


View = dict[str, Cell]


def save_view(cells: View) -> bytes:
    """Cells as a compressed file: equal ones give equal bytes."""
    rows = {key: [cell.kind, dict(cell.config), dict(cell.inputs)] for key, cell in sorted(cells.items())}
    return lzma.compress(json.dumps(rows, sort_keys=True).encode())


def load_view(content: bytes) -> View:
    """Cells of a file that `save_view` gave. Raises FormatError for another one."""
    try:
        rows = json.loads(lzma.decompress(content))
        return {key: Cell(kind, config, inputs) for key, (kind, config, inputs) in rows.items()}
    except (lzma.LZMAError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"a routed netlist must be one that a build wrote, not this file: {error}") from None


def key_of(net: str) -> str:
    """The cell that drives a net; a constant or an open net is its own."""
    return net.partition(":")[0]


def make_lut(table: int, nets: Iterable[str]) -> Cell:
    """A LUT as a function of the different nets at its inputs, sorted; without those that change nothing.

    table: the output by the inputs, of which the first is the lowest bit of the index.
    """
    given = list(nets)
    names = sorted({net for net in given if net not in ("0", "1")})
    bits = [_look_up(table, given, dict(zip(names, _bits(row, len(names)), strict=True)))
            for row in range(1 << len(names))]  # fmt: skip
    for place in reversed(range(len(names))):
        step = 1 << place
        low, high = ([bit for row, bit in enumerate(bits) if row & step == side] for side in (0, step))
        if low == high:
            bits = low
            del names[place]
    return Cell("LUT", {"table": sum(bit << row for row, bit in enumerate(bits))},
                {f"I{place}": net for place, net in enumerate(names)})  # fmt: skip


def fold_inversions(cell: Cell) -> Cell:
    """A block whose inverters at constant pins are off, the constants what came out of them."""
    config, inputs = dict(cell.config), dict(cell.inputs)
    for name in [name for name in config if name.endswith("_INVERTED")]:
        bus = name.removesuffix("_INVERTED")
        for pin in inputs:
            index = pin.removeprefix(bus)
            if pin.startswith(bus) and (index.isdigit() or not index) and inputs[pin] in ("0", "1"):
                bit = int(index or 0)
                inputs[pin] = str(int(inputs[pin]) ^ (config[name] >> bit & 1))
                config[name] &= ~(1 << bit)
    return Cell(cell.kind, config, inputs)


def _bits(row: int, count: int) -> list[int]:
    return [row >> place & 1 for place in range(count)]


def _look_up(table: int, nets: list[str], values: Mapping[str, int]) -> int:
    index = sum((int(net) if net in ("0", "1") else values[net]) << place for place, net in enumerate(nets))
    return table >> index & 1


def collect(roots: Iterable[str], read: Callable[[str], Cell | None], passes: Callable[[str], bool]) -> View:
    """All cells that the roots' inputs come from, and the roots.

    read: the cell of a key. passes: of the key of a clock buffer, or of a LUT that hands one input on, whether it is a
    wire (a router's way through it) and no cell. LUTs and clock buffers that are constant, and such wires, become what
    they give.
    """
    cells: View = {}
    waiting = list(roots)
    while waiting:
        key = waiting.pop()
        if key in cells or key in ("0", "1") or key.startswith(OPEN):
            continue
        cell = read(key)
        if cell is not None:
            cells[key] = cell
            waiting += map(key_of, cell.inputs.values())
    while replaced := {key: net for key, cell in cells.items() if (net := _replace(key, cell, passes)) is not None}:
        kept = {key: cell for key, cell in cells.items() if key not in replaced}
        cells = {key: _rename(cell, replaced) for key, cell in kept.items()}
    return cells


def _replace(key: str, cell: Cell, passes: Callable[[str], bool]) -> str | None:
    if cell.kind == "BUFGCTRL":  # ground, or a net of many pins, which the router takes over the clock's wires
        source = cell.inputs["I0"]
        return source if source in ("0", "1") or (".PS7:" not in source and passes(key)) else None
    if cell.kind != "LUT":
        return None
    table, nets = cell.config["table"], list(cell.inputs.values())
    if not nets:
        return str(table)
    return nets[0] if len(nets) == 1 and table == 0b10 and passes(key) else None


def _rename(cell: Cell, replaced: Mapping[str, str]) -> Cell:
    if replaced.keys().isdisjoint(cell.inputs.values()):
        return cell
    inputs = {}
    for pin, net in cell.inputs.items():
        while net in replaced:
            net = replaced[net]
        inputs[pin] = net
    if cell.kind == "LUT":
        return make_lut(cell.config["table"], inputs.values())
    return fold_inversions(Cell(cell.kind, cell.config, inputs))
