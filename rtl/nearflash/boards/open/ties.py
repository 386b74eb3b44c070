"""Ties of a DSP slice's constant pins, and a bit of its registers, which nextpnr's FASM leaves out.

INMODE, ALUMODE[3:2], OPMODE[6], D, CARRYINSEL[2], some enables and one reset of a DSP48E1 have configuration bits of
their own for a constant: one connects the pin to ground, one to VCC. nextpnr 0.11.1 sets them for all but INMODE,
ALUMODE and OPMODE (`pack_dsp_xc7.cc` leaves these out as "inverted for unknown reasons"): for a 0 it inverts the pin
and leaves it to read a 1, which no bit provides. On silicon it reads a 0, so that INMODE becomes 11111 and a product
ignores A; with ties all vectors are right (openXC7/nextpnr-xilinx, pull request 159, measured on an XC7Z010). Here each
such pin gets its tie as the vendor's tools give it, and no inverter.

AREG_2_ACASCREG_1 of prjxray's database is two registers of A, the first of which goes on to the next slice; its bit is
set for anything else (ZAREG_..., and the same of B). nextpnr sets it for ACASCREG = 0 alone, so that a slice with one
register of A has two on silicon.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.fasm import Feature

__all__ = ["CONSTANT_NETS", "Site", "list_ties", "locate"]

#: Cells of nextpnr's netlist that drive constants, and these.
CONSTANT_NETS = {"PSEUDO_GND": 0, "PSEUDO_VCC": 1}
_BEL = re.compile(r"X(\d+)Y(\d+)/([A-Z0-9]+)_X(\d+)Y(\d+)\.(.+)")

Site = tuple[str, str, int, int, str]
"""Tile, kind of site, its place within the tile (column, row), and the BEL."""


def locate(database: PartDatabase, cell: Mapping[str, Any]) -> Site:
    """Find the place that nextpnr gave a cell of its routed netlist. Raises FormatError for a cell without a place."""
    found = _BEL.fullmatch(bel := cell["attributes"].get("NEXTPNR_BEL", ""))
    tile = database.find_tile(int(found[1]), int(found[2])) if found else None
    if found is None or tile is None:
        raise FormatError(f"a routed cell must have a place in {database.device} like X1Y2/SLICE_X0Y0.AFF, not {bel!r}")
    return tile, found[3], int(found[4]), int(found[5]), found[6]


def list_ties(database: PartDatabase, cells: Mapping[str, Any]) -> Iterator[str]:
    """FASM lines that tie the DSP slices' constant pins of a routed netlist (nextpnr's JSON) that have no tie yet.

    And the lines of their registers that are missing.
    """
    constants = {cell["connections"]["Y"][0]: CONSTANT_NETS[cell["type"]]
                 for cell in cells.values() if cell["type"] in CONSTANT_NETS}  # fmt: skip
    for cell in cells.values():
        if cell["type"] != "DSP48E1_DSP48E1":
            continue
        tile, _, _, slice_number, _ = locate(database, cell)
        yield from _list_registers(f"{tile}.DSP48.DSP_{slice_number}", cell["parameters"])
        for pin, nets in cell["connections"].items():
            source = constants.get(nets[0]) if nets else None
            tied = f"DSP_{slice_number}_{pin}.DSP_{{}}_{tile[len('DSP_')]}"
            if source is None or database.bits(Feature(tile, tied.format("GND"))) is None:
                continue
            bus, index = re.fullmatch(r"(\w+?)(\d*)", pin).groups()  # type: ignore[union-attr]
            inverted = _is_inverted(cell["parameters"], bus, int(index or 0))
            yield f"{tile}.{tied.format('VCC' if source ^ inverted else 'GND')}"
            plain = Feature(tile, f"DSP48.DSP_{slice_number}.ZIS_{bus}_INVERTED", int(index or 0))
            if database.bits(plain) is not None:
                yield str(plain)


def _list_registers(place: str, parameters: Mapping[str, str]) -> Iterator[str]:
    """The bits of A and B of a slice that has not two registers of which the first goes on."""
    for side in "AB":
        registers, cascaded = (int(parameters.get(f"{side}{name}", "1"), 2) for name in ("REG", "CASCREG"))
        if (registers, cascaded) != (2, 1):
            yield f"{place}.Z{side}REG_2_{side}CASCREG_1"


def _is_inverted(parameters: Mapping[str, str], bus: str, index: int) -> bool:
    """Whether nextpnr inverts a pin: by the netlist's parameter of the bus, or by its own of the pin."""
    whole = int(parameters.get(f"IS_{bus}_INVERTED", "0"), 2) >> index & 1
    return bool(whole | int(parameters.get(f"IS_{bus}[{index}]_INVERTED", "0"), 2))
