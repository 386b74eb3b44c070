"""Detours for signals that change too early, in a switch box of six wires between one slice's pins."""

import json

import pytest

from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.decode.detours import Detours
from nearflash.boards.open.decode.fabric import SitePin
from nearflash.boards.open.decode.routes import PipFabric
from nearflash.boards.open.fasm import Feature

BOX, SLICE = "INT_L_X0Y0", "CLBLL_L_X1Y0"
PINS = {"AQ": "OUT", "AX": "BYP_AX", "BX": "BYP_BX"}
PIPS = [
    ("OUT", "BYP_AX"), ("OUT", "BYP_BX"),  # the shortest ways
    ("OUT", "NEAR"), ("NEAR", "BYP_AX"), ("NEAR", "BYP_BX"),
    ("NEAR", "FAR"), ("FAR", "BYP_AX"), ("FAR", "FARTHER"), ("FARTHER", "BYP_AX"),
]  # fmt: skip
OUT, AX, BX = (SitePin(SLICE, 0, pin) for pin in PINS)


@pytest.fixture
def make(tmp_path):
    """A fabric with the pips given on; each pip takes 100 ps."""
    pips = {
        f"{to}.{source}": {
            "src_wire": source, "dst_wire": to, "src_to_dst": {"delay": ["0.04", "0.05", "0.1", "0.12"], "res": "0"}
        }
        for source, to in PIPS
    }  # fmt: skip
    wires = {wire: {"cap": "0", "res": "0"} for pip in PIPS for wire in pip}
    files = {
        "mapping/parts.yaml": "desk7:\n  device: desk7\n",
        "mapping/devices.yaml": "desk7:\n  fabric: fabric7\n",
        "fabric7/tilegrid.json": {
            BOX: {"type": "INT_L", "grid_x": 0, "grid_y": 0, "sites": {}},
            SLICE: {"type": "CLBLL_L", "grid_x": 1, "grid_y": 0, "sites": {"SLICE_X0Y0": "SLICEL"}},
        },
        "fabric7/tileconn.json": [
            {"grid_deltas": [1, 0], "tile_types": ["INT_L", "CLBLL_L"], "wire_pairs": [[w, p] for p, w in PINS.items()]}
        ],
        "tile_type_INT_L.json": {"wires": wires, "sites": [], "pips": pips},
        "tile_type_CLBLL_L.json": {
            "wires": {pin: {} for pin in PINS}, "pips": {},
            "sites": [{"type": "SLICEL", "site_pins": {pin: {"wire": pin} for pin in PINS}}],
        },
        "site_type_SLICEL.json": {"site_pins": {pin: {"direction": "OUT" if pin == "AQ" else "IN"} for pin in PINS}},
        "segbits_int_l.db": "".join(f"INT_L.{name} 00_{at:02}\n" for at, name in enumerate(pips)),
    }  # fmt: skip
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    database = PartDatabase(tmp_path, "desk7")

    def make(*on):
        fabric = PipFabric(database, {BOX: frozenset(f"{to}.{source}" for source, to in on)})
        pins = {pin.pin: (pin, OUT) for pin in (AX, BX) if fabric.drive(*pin) == OUT}
        return fabric, Detours(fabric, pins)

    return make


def features(*pips):
    return frozenset(Feature(BOX, f"{to}.{source}") for source, to in pips)


@pytest.mark.parametrize(
    ("ps", "way"),
    [
        (50, [("OUT", "NEAR"), ("NEAR", "BYP_AX")]),
        (100, [("OUT", "NEAR"), ("NEAR", "BYP_AX")]),
        (101, [("OUT", "NEAR"), ("NEAR", "FAR"), ("FAR", "BYP_AX")]),
        (300, [("OUT", "NEAR"), ("NEAR", "FAR"), ("FAR", "FARTHER"), ("FARTHER", "BYP_AX")]),
    ],
)
def test_a_pin_gets_the_shortest_route_that_is_long_enough(make, ps, way):
    fabric, detours = make(("OUT", "BYP_AX"))
    assert detours.lengthen("AX", ps)
    assert detours.edits == (features(("OUT", "BYP_AX")), features(*way))
    assert fabric.drive(*AX) == OUT, "from the same pin as before"


def test_a_pin_without_a_route_long_enough_keeps_its_own(make):
    fabric, detours = make(("OUT", "BYP_AX"))
    assert not detours.lengthen("AX", 301)
    assert detours.edits == (frozenset(), frozenset())
    assert fabric.drive(*AX) == OUT


def test_a_detour_uses_no_wire_that_another_net_drives(make):
    _, detours = make(("OUT", "BYP_AX"), ("FAR", "FARTHER"), ("NEAR", "FAR"))
    assert detours.lengthen("AX", 50)
    assert detours.edits.added == features(("OUT", "NEAR"), ("NEAR", "BYP_AX"))
    _, detours = make(("OUT", "BYP_AX"), ("FAR", "FARTHER"), ("NEAR", "FAR"))
    assert not detours.lengthen("AX", 150)


def test_parts_of_the_old_route_go_that_no_other_pin_needs(make):
    fabric, detours = make(("OUT", "NEAR"), ("NEAR", "BYP_AX"))
    assert detours.lengthen("AX", 50)
    assert detours.edits == (features(("NEAR", "BYP_AX")), features(("NEAR", "FAR"), ("FAR", "BYP_AX")))
    fabric, detours = make(("OUT", "NEAR"), ("NEAR", "BYP_AX"), ("NEAR", "BYP_BX"))
    assert detours.lengthen("AX", 50)
    assert fabric.drive(*BX) == fabric.drive(*AX) == OUT


def test_a_second_detour_uses_no_wire_of_the_first(make):
    fabric, detours = make(("OUT", "BYP_AX"), ("OUT", "BYP_BX"))
    assert detours.lengthen("AX", 50) and not detours.lengthen("BX", 50), "the one way for BX is AX's now"
    assert fabric.drive(*BX) == fabric.drive(*AX) == OUT
