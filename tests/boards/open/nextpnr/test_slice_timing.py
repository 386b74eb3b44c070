"""Delays of slices, from SDF files as prjxray's."""

import pytest

from nearflash.boards.open.nextpnr.slice_timing import SliceDelays, slice_delays
from nearflash.boards.open.nextpnr.timing import BlockDelays

SLICEM = """(DELAYFILE (TIMESCALE 1ns)
    (CELL
        (CELLTYPE "REG_INIT_FF")
        (INSTANCE SLICEM)
        (DELAY (ABSOLUTE (IOPATH CLK Q (0.118::0.147)(0.292::0.362))))
        (TIMINGCHECK
            (HOLD DIN (posedge CLK) (0.211::0.262))
            (SETUP DIN (posedge CLK) (-0.074::-0.060))
        )
    )
    (CELL
        (CELLTYPE "REG_INIT_FF_QH")
        (INSTANCE SLICEM)
        (DELAY (ABSOLUTE (IOPATH SR Q (0.197::0.245)(0.489::0.606))))
        (TIMINGCHECK (RECOVERY SR (posedge CLK) (0.314::0.389)))
    )
    (CELL
        (CELLTYPE "LUT_OR_MEM6LRAM")
        (INSTANCE SLICEM/A6LUT)
        (DELAY (ABSOLUTE
            (IOPATH A1 O6 (0.045::0.056)(0.100::0.124))
            (IOPATH CLK O6 (0.432::0.538)(0.930::1.153))
        ))
        (TIMINGCHECK (SETUP WA1 (posedge CLK) (0.184::0.066)))
    )
    (CELL
        (CELLTYPE "LUT_OR_MEM6SHFREG")
        (INSTANCE SLICEM/D6LUT)
        (DELAY (ABSOLUTE (IOPATH CLK O6 (0.438::0.545)(1.174::1.456))))
    )
    (CELL
        (CELLTYPE "CARRY4_O5")
        (INSTANCE SLICEM)
        (DELAY (ABSOLUTE (IOPATH DI0 CO0 (0.084::0.111)(0.248::0.327))))
    )
)"""
SLICEL = """(CELL (CELLTYPE "REG_INIT_FF") (INSTANCE SLICEL)
    (DELAY (ABSOLUTE (IOPATH CLK Q (0.112::0.139)(0.274::0.340))))
    (TIMINGCHECK (SETUP DIN (posedge CLK) (-0.055::-0.045)))
)"""


def test_cells_get_the_largest_value_of_both_kinds_of_slice():
    tables = slice_delays([SLICEL, SLICEM], {}).tables
    assert tables["AFF",] == BlockDelays(
        setups={("AFFMUX_OUT", "CLK"): -45, ("SRUSEDMUX_OUT", "CLK"): 389}, launches={("CLK", "AQ"): 362}
    ), "the time that a reset needs to end before the clock is its setup"
    assert tables["CARRY4",] == BlockDelays(paths={("ACY0_OUT", "CARRY4_CO0"): 327})


def test_a_memory_or_shift_register_in_a_lut_has_clock_to_output_and_setup():
    slices = slice_delays([SLICEL, SLICEM], {"CLBLM_M_A1": 531})
    assert slices.tables["A6LUT", "A5LUT"] == BlockDelays(
        paths={("A1", "A6LUT_O6"): 124}, setups={("D1", "CLK"): 184}, launches={("CLK", "A6LUT_O6"): 1456}
    )
    assert (slices.through, slices.pins) == (124, {"CLBLM_M_A1": 531})


@pytest.mark.parametrize(
    ("part", "entry", "wires"),
    [
        ("AFF", "ax aff", ("AX", "AFFMUX_OUT")),
        ("BFFL", "b6lut bffl", ("B6LUT_O6", "BFFMUX_OUT")),
        ("A5FF", "a5lut a5ff", ("A5LUT_O5", "A5FFMUX_OUT")),
        ("AFFL2", "a5lut affl2", ("A5LUT_O5", "AFFMUX_OUT")),
        ("AFF", "ce aff", ("CE", "CEUSEDMUX_OUT")),
        ("C5FF", "sr c5ff", ("SR", "SRUSEDMUX_OUT")),
        ("CLKINV", "clk clkinv", ("CLK", "CLKINV_OUT")),
        ("AMUX", "carry4_co0 amux", ("CARRY4_CO0", "AMUX")),
        ("BMUX", "f8mux bmux", ("F8MUX_OUT", "BMUX")),
        ("CMUXL", "f7bmux cmuxl", ("F7BMUX_OUT", "CMUX")),
        ("AMUX", "a5ff amux", ("A5FF_Q", "AMUX")),
        ("DMUX", "a6lut dmux", ("A6LUT_MC31", "DMUX")),
        ("DCY0", "dx di3", ("DX", "DCY0_OUT")),
        ("D", "d6lut d", ("D6LUT_O6", "D")),
        ("AFF", "o6 aff", None),
        ("AFF", "clk aff", None),
        ("F7AMUX", "a6lut f7amux", None),
    ],
)
def test_connections_within_a_slice_have_nextpnrs_names(part, entry, wires):
    text = f'(CELL (CELLTYPE "ROUTING_BEL") (INSTANCE SLICEM/{part}) (INTERCONNECT {entry} (0.1::0.125)(0.175::0.217)))'
    assert slice_delays([SLICEM, text], {}).inside == ({} if wires is None else {wires: 217})


def test_without_files_nextpnrs_stubs_stay():
    assert slice_delays(["", ""], {"CLBLM_M_A1": 531}) == SliceDelays()
