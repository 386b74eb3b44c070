"""Delays of routes and cells, from prjxray's units and SDF files."""

from types import SimpleNamespace

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.decode.fabric import SitePin
from nearflash.boards.open.decode.paths import Delay
from nearflash.boards.open.decode.routes import Figures, Routes

SLICE = {"site_pins": {
    "AQ": {"wire": "AQ", "delay": ["0.000"] * 4, "res": "1427.9375"},
    "A1": {"wire": "A1", "delay": ["0.180", "0.225", "0.428", "0.531"], "cap": "0.000"},
}}  # fmt: skip
PIP = {"delay": ["0.058", "0.071", "0.153", "0.175"], "res": "1915.178375"}
LONG = {"cap": "13.000", "res": "2.800"}
NODES = {  # by wire: its node, and tile, source and target of the pip into it
    ("CLB", "A1"): ([("CLB", "A1"), ("INT", "IMUX")], ("INT", "LV", "IMUX")),
    ("INT", "LV"): ([("INT", "LV"), ("NEXT", "LV")], ("INT", "OUT", "LV")),
    ("INT", "OUT"): ([("INT", "OUT"), ("CLB", "AQ")], None),
}


@pytest.fixture
def fabric():
    """A slice whose AQ goes over a long line of two tiles, 26 units of capacitance, to its own A1."""
    pips = {"a": {"src_wire": "LV", "dst_wire": "IMUX", "src_to_dst": PIP},
            "b": {"src_wire": "OUT", "dst_wire": "LV", "src_to_dst": PIP}}  # fmt: skip
    database = SimpleNamespace(tiles={"INT": {"type": "INT_L"}}, tile_type=lambda kind: {"pips": pips})
    wires = {"LV": LONG, "OUT": None, "AQ": None, "A1": None, "IMUX": None}
    return SimpleNamespace(
        database=database,
        step=NODES.__getitem__,
        sites=lambda tile: [SLICE],
        kind=lambda tile: SimpleNamespace(wires=wires),
    )


def test_a_route_takes_its_pips_what_they_charge_and_its_pin(fabric):
    charged = round((1915.178375 + (2.8 + 2.8) / 2) * 26 / 1000)  # ps: half of the wires' resistance is before the load
    assert charged == 50
    found = Routes(fabric).find(SitePin("CLB", 0, "A1"), SitePin("CLB", 0, "AQ"))
    assert found == Delay(2 * 153 + charged + 428, 2 * 175 + charged + 531)


def test_the_output_pin_charges_the_first_node(fabric):
    fabric.kind("CLB").wires["OUT"] = {"cap": "10.000", "res": "0.000"}
    found = Routes(fabric).find(SitePin("CLB", 0, "A1"), SitePin("CLB", 0, "AQ"))
    assert found.least == 2 * 153 + 50 + 428 + 14, "1.4279375 by 10"


def test_wires_that_routes_share_are_passed_once(fabric):
    asked = []
    fabric.step = lambda wire: asked.append(wire) or NODES[wire]
    routes = Routes(fabric)
    assert len({routes.find(SitePin("CLB", 0, "A1"), SitePin("CLB", 0, "AQ")) for _ in range(2)}) == 1
    assert asked == list(NODES)


SDF = """
(CELL (CELLTYPE "LUT_OR_MEM6LRAM") (INSTANCE SLICEM/A6LUT)
    (IOPATH CLK O6 (0.432::0.538)(0.930::1.153))
    (SETUP DI1 (posedge CLK) (0.366::0.453)) (HOLD DI1 (posedge CLK) (0.155::0.192)))
(CELL (CELLTYPE "LUT_OR_MEM6SHFREG") (INSTANCE SLICEM/A6LUT) (IOPATH CLK O6 (0.444::0.553)(1.186::1.472)))
(CELL (CELLTYPE "LUT_OR_MEM6LRAM") (INSTANCE SLICEM)
    (HOLD WA1 (posedge CLK) (0.728::0.538)) (SETUP WA1 (posedge CLK) (0.184::0.066)))
(CELL (CELLTYPE "REG_INIT_FF_QH") (INSTANCE SLICEM)
    (RECOVERY SR (posedge CLK) (0.314::0.389)) (REMOVAL SR (posedge CLK) (-0.292::-0.238)))
"""


@pytest.fixture
def figures():
    return Figures(SimpleNamespace(delays={"slicem": SDF, "slicel": ""}.get), {"SLICEM": "slicem", "SLICEL": "slicel"})


def test_a_delay_is_the_slow_corners_of_the_cells_asked_for(figures):
    assert figures.delay("SLICEM", "A6LUT", "CLK", "O6", "LUT_OR_MEM6LRAM") == Delay(930, 1153)
    assert figures.delay("SLICEM", "A6LUT", "CLK", "O6") == Delay(930, 1472)
    assert figures.find("SLICEL", "A6LUT", "CLK", "O6") is None
    with pytest.raises(FormatError, match="the database must have a delay of SLICEM B6LUT from CLK to O6, not none"):
        figures.delay("SLICEM", "B6LUT", "CLK", "O6")


def test_a_check_has_the_largest_setup_and_the_hold_of_the_least_delay(figures):
    assert figures.check("SLICEM", "A6LUT", "DI1", "CLK") == {"setup": 453, "hold": 192}
    assert figures.check("SLICEM", "", "WA1", "CLK") == {"setup": 184, "hold": 538}
    assert figures.check("SLICEM", "", "SR", "CLK", "REG_INIT_FF") == {"setup": 389, "hold": -238}
    assert figures.check("SLICEM", "", "SR", "CLK", "FF_INIT") == {}
