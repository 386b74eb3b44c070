"""SDF files as prjxray writes them."""

from nearflash.boards.open.nextpnr.sdf import Entry, SdfCell, read_cells

TEXT = """(DELAYFILE (SDFVERSION "3.0") (TIMESCALE 1ns)
    (CELL
        (CELLTYPE "FF_INIT")
        (INSTANCE SLICEM)
        (DELAY (ABSOLUTE (IOPATH CLK Q (0.102::0.127)(0.259::0.322))))
        (TIMINGCHECK
            (HOLD CE (posedge CLK) (-0.007::-0.005))
            (RECOVERY SR (posedge CLK) (0.279::0.347))
        )
    )
    (CELL
        (CELLTYPE "ROUTING_BEL")
        (INSTANCE SLICEM/ACY0)
        (DELAY (ABSOLUTE (INTERCONNECT ax di0 (0.111::0.111) (0.111::0.111))))
    )
)"""


def test_cells_have_their_delays_and_checks_in_ps():
    assert read_cells(TEXT) == [
        SdfCell("FF_INIT", "SLICEM", [
            Entry("IOPATH", "CLK", "Q", (102, 127, 259, 322)), Entry("HOLD", "CE", "CLK", (-7, -5)),
            Entry("RECOVERY", "SR", "CLK", (279, 347)),
        ]),
        SdfCell("ROUTING_BEL", "SLICEM/ACY0", [Entry("INTERCONNECT", "ax", "di0", (111, 111, 111, 111))]),
    ]  # fmt: skip
    assert read_cells("") == []


def test_an_entry_has_its_least_and_its_most():
    launch, hold, *_ = read_cells(TEXT)[0].entries
    assert (launch.least, launch.most, hold.least, hold.most) == (102, 322, -7, -5)
