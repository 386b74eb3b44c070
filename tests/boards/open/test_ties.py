"""Ties of DSP slices' constant pins, as the vendor's tools give them, in the database that the programs bring."""

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.packages import find_programs
from nearflash.boards.open.ties import list_ties, locate

GND, VCC, SIGNAL = 1, 2, 3
CONSTANTS = {"gnd": {"type": "PSEUDO_GND", "connections": {"Y": [GND]}},
             "vcc": {"type": "PSEUDO_VCC", "connections": {"Y": [VCC]}}}  # fmt: skip
#: An inverted pin as nextpnr writes it.
INVERTED = "1".zfill(32)


@pytest.fixture(scope="module")
def part():
    programs = find_programs()
    if programs is None:
        pytest.skip("programs of Debian sid were not fetched: make bitstream fetches them")
    return PartDatabase(programs.bit_database("zynq7"), "xc7z020clg400-1")


def ties(part, pin, net, **parameters):
    cell = {"type": "DSP48E1_DSP48E1", "parameters": parameters, "connections": {pin: [net]},
            "attributes": {"NEXTPNR_BEL": "X147Y98/DSP48_X0Y1.DSP48E1"}}  # fmt: skip
    lines = [line.removeprefix("DSP_R_X59Y55.") for line in list_ties(part, {**CONSTANTS, "mul": cell})]
    return [line for line in lines if "CASCREG" not in line]


@pytest.mark.parametrize(
    ("net", "inversion", "tie"),
    [
        (VCC, {"IS_INMODE[3]_INVERTED": INVERTED}, "GND"),  # nextpnr's constant 0
        (VCC, {}, "VCC"),
        (GND, {}, "GND"),
        (VCC, {"IS_INMODE_INVERTED": "01000"}, "GND"),  # the netlist's own inverter
        (VCC, {"IS_INMODE_INVERTED": "10111"}, "VCC"),
    ],
)
def test_a_constant_pin_is_tied_to_its_value_without_an_inverter(part, net, inversion, tie):
    assert ties(part, "INMODE3", net, **inversion) == [
        f"DSP_1_INMODE3.DSP_{tie}_R", "DSP48.DSP_1.ZIS_INMODE_INVERTED[3]"
    ]  # fmt: skip


def test_all_pins_with_ties_get_one_and_no_others(part):
    for pin in (*(f"INMODE{bit}" for bit in range(5)), "ALUMODE2", "ALUMODE3", "OPMODE6"):
        assert len(ties(part, pin, GND)) == 2
    assert ties(part, "CEINMODE", VCC) == ["DSP_1_CEINMODE.DSP_VCC_R"], "without an inverter of its own"
    for pin in ("ALUMODE1", "OPMODE5", "A3", "CEP"):
        assert ties(part, pin, GND) == [], "reached by the interconnect, which has a default"
    assert ties(part, "INMODE3", SIGNAL) == []


def test_a_cell_without_a_place_is_an_error(part):
    for place in ({}, {"NEXTPNR_BEL": "X9999Y1/SLICE_X0Y0.AFF"}, {"NEXTPNR_BEL": "X1Y1/PSEUDO_GND"}):
        with pytest.raises(FormatError, match=r"a routed cell must have a place in xc7z020 like X1Y2/SLICE_X0Y0\.AFF"):
            locate(part, {"attributes": place})


@pytest.mark.parametrize(("registers", "cascaded", "is_set"), [(0, 0, True), (1, 1, True), (2, 2, True), (2, 1, False)])
def test_a_slice_has_two_registers_only_where_it_shall(part, registers, cascaded, is_set):
    """Regression: slices with one register of A or B had two on silicon."""
    parameters = {f"{side}{name}": f"{value:032b}" for side in "AB"
                  for name, value in (("REG", registers), ("CASCREG", cascaded))}  # fmt: skip
    cell = {"type": "DSP48E1_DSP48E1", "parameters": parameters, "connections": {},
            "attributes": {"NEXTPNR_BEL": "X147Y98/DSP48_X0Y1.DSP48E1"}}  # fmt: skip
    lines = [f"DSP_R_X59Y55.DSP48.DSP_1.Z{side}REG_2_{side}CASCREG_1" for side in "AB"]
    assert list(list_ties(part, {**CONSTANTS, "mul": cell})) == (lines if is_set else [])
