"""A decoded bitstream against the routed netlist that it was made of, place by place: exact, without vectors."""

from nearflash.abi.errors import BitstreamError
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.decode.bitstream import decode_netlist
from nearflash.boards.open.decode.cells import Cell, View
from nearflash.boards.open.frames import Place

__all__ = ["check_bits", "list_differences"]

_BLOCKS = ("DSP48E1", "PS7", "RAMB18E1")
"""Cells with pins that a netlist may leave away, as their configuration does not read them."""


def check_bits(database: PartDatabase, bits: set[Place], routed: View) -> None:
    """Decode the bits of a design and compare them with its routed netlist.

    Raises BitstreamError that names site pins in use which nothing drives, or a place that differs; FormatError for
    bits that are no design.
    """
    netlist = decode_netlist(database, bits)
    different = list_differences(routed, netlist.cells(frozenset(routed)))
    if netlist.undriven:
        raise BitstreamError(f"each pin of a site in use must have a driver, or a level that is known, not "
                             f"{_name(netlist.undriven)}: tie it, or state its level in UNREAD_PINS")  # fmt: skip
    if different:
        place, what = next(iter(different.items()))
        raise BitstreamError(f"bits must be those of the routed netlist, but {len(different)} places differ: {place} "
                             f"({what})")  # fmt: skip


def _name(pins: set[str]) -> str:
    return ", ".join(sorted(pins)[:4]) + (f" and {len(pins) - 4} more" if len(pins) > 4 else "")


def list_differences(routed: View, decoded: View) -> dict[str, str]:
    """List what differs, by place: the cell's kind, its configuration, or the driver of an input."""
    places = sorted(routed.keys() | decoded.keys())
    found = {place: _differ(routed.get(place), decoded.get(place)) for place in places}
    return {place: what for place, what in found.items() if what}


def _differ(routed: Cell | None, decoded: Cell | None) -> str:
    if routed is None or decoded is None or routed.kind != decoded.kind:
        return f"{decoded.kind if decoded else 'nothing'} in place of {routed.kind if routed else 'nothing'}"
    inputs = {pin: net for pin, net in decoded.inputs.items() if pin in routed.inputs or routed.kind not in _BLOCKS}
    parts = ((dict(routed.config), dict(decoded.config)), (dict(routed.inputs), inputs))
    wrong = [f"{name} is {got.get(name)} in place of {wanted.get(name)}" for wanted, got in parts
             for name in sorted(wanted.keys() | got.keys()) if wanted.get(name) != got.get(name)]  # fmt: skip
    return "; ".join(wrong)
