"""Delays of hard blocks, from SDF files as prjxray's."""

import pytest

from nearflash.boards.open.nextpnr.timing import (
    BlockDelays,
    assign_types,
    block_of,
    dsp_delays,
    dsp_parameters,
    processor_delays,
)

DSP = """(DELAYFILE (TIMESCALE 1ns)
    (CELL
        (CELLTYPE "DSP48E1_AREG_0_A_INPUT_DIRECT_MREG_0_PREG_0_USE_DPORT_FALSE_USE_MULT_MULTIPLY")
        (INSTANCE DSP48E1)
        (DELAY (ABSOLUTE
                (IOPATH A CARRYOUT (0.603::1.632)(1.380::3.818))
                (IOPATH A P (0.609::1.642)(1.391::3.841))
        ))
    )
    (CELL
        (CELLTYPE "DSP48E1_AREG_0_A_INPUT_DIRECT_PREG_0_USE_MULT_NONE")
        (DELAY (ABSOLUTE
                (IOPATH A P (0.404::0.873)(0.911::2.077))
        ))
    )
    (CELL
        (CELLTYPE "DSP48E1_AREG_1_A_INPUT_DIRECT")
        (TIMINGCHECK
            (HOLD A (posedge CLK) (-0.362::0.139))
            (SETUP A (posedge CLK) (-0.139::0.362))
        )
    )
    (CELL
        (CELLTYPE "DSP48E1_PREG_1")
        (DELAY (ABSOLUTE
                (IOPATH CLK P (0.126::0.192)(0.304::0.434))
        ))
    )
    (CELL
        (CELLTYPE "DSP48E1_PREG_1_USE_PATTERN_DETECT_PATDET")
        (TIMINGCHECK
            (SETUP PCIN (posedge CLK) (0.285::1.792))
        )
    )
    (CELL
        (CELLTYPE "DSP48E1DREG_1_ADREG_0_DREG_0_USE_DPORT_TRUE_USE_MULT_DYNAMIC")
        (TIMINGCHECK
            (SETUP D (posedge CLK) (0.285::9.9))
        )
    )
)"""
PROCESSOR = """(CELL (CELLTYPE "PS7") (INSTANCE PS7)
(IOPATH SAXIHP0ACLK SAXIHP0RDATA (0.359::0.478)(1.130::1.507))
(SETUP SAXIHP0WDATA (posedge SAXIHP0ACLK) (0.4::0.8))
)"""
REGISTERED = BlockDelays(setups={("A", "CLK"): 362}, launches={("CLK", "P"): 434})
NONE = {"AREG": "0", "MREG": "0", "PREG": "0"}


def test_a_slice_without_registers_passes_its_inputs_on():
    paths = {("A", "CARRYOUT"): 3818, ("A", "P"): 3841}
    assert dsp_delays(DSP, NONE) == BlockDelays(paths=paths)
    assert dsp_delays(DSP, {**NONE, "USE_MULT": "NONE"}) == BlockDelays(paths={("A", "P"): 2077})


def test_registers_begin_and_end_paths():
    assert dsp_delays(DSP, {}) == REGISTERED, "registers are what a slice has where nothing is said"
    assert dsp_delays(DSP, {"AREG": "1", "MREG": "1", "PREG": "1"}) == REGISTERED
    assert dsp_delays(DSP, {"AREG": "2", "MREG": "0"}) == BlockDelays(launches={("CLK", "P"): 434})
    assert dsp_delays("", NONE) == BlockDelays()


@pytest.mark.parametrize("registers", ["0", "1"])
def test_of_a_value_that_the_file_gives_twice_either_counts(registers):
    parameters = {"USE_DPORT": "TRUE", "USE_MULT": "DYNAMIC", "ADREG": "0", "DREG": registers, "PREG": "0"}
    assert dsp_delays(DSP, parameters).setups["D", "CLK"] == 9900
    assert ("D", "CLK") not in dsp_delays(DSP, {**parameters, "ADREG": "1"}).setups


def test_the_processor_has_its_ports_delays():
    assert processor_delays(PROCESSOR) == BlockDelays(
        setups={("SAXIHP0WDATA", "SAXIHP0ACLK"): 800}, launches={("SAXIHP0ACLK", "SAXIHP0RDATA"): 1507}
    )


def test_parameters_are_read_from_a_netlist():
    cell = {"type": "DSP48E1",
            "parameters": {"AREG": f"{2:032b}", "USE_MULT": "MULTIPLY", "A_INPUT": "CASCADE "}}  # fmt: skip
    assert dsp_parameters(cell) == {"AREG": "2", "USE_MULT": "MULTIPLY", "A_INPUT": "CASCADE"}
    assert dsp_parameters({"type": "DSP48E1"}) == {}


def test_slices_with_other_registers_have_other_delays():
    # Regression: one table for all slices gave those with registers the paths of those without.
    def mul(**parameters):
        return {"type": "DSP48E1", "parameters": parameters}

    cells = {"lut": {"type": "LUT2", "parameters": {"INIT": "0110"}}, "registered": mul(MASK="1"),
             "passing": mul(**NONE), "masked": mul(MASK="0"), "ps": {"type": "PS7"}}  # fmt: skip
    delays = assign_types(cells, DSP, PROCESSOR)
    assert {name: cell["type"] for name, cell in cells.items()} == {
        "lut": "LUT2", "registered": "DSP48E1_0", "masked": "DSP48E1_0", "passing": "DSP48E1_1", "ps": "PS7_0"
    }  # fmt: skip
    assert delays == {
        "DSP48E1_0": REGISTERED, "DSP48E1_1": dsp_delays(DSP, NONE), "PS7_0": processor_delays(PROCESSOR)
    }  # fmt: skip
    assert not delays["DSP48E1_0"].paths and [block_of(kind) for kind in delays] == ["DSP48E1", "DSP48E1", "PS7"]


def test_blocks_without_delays_share_a_type():
    cells = {"first": {"type": "DSP48E1", "parameters": NONE}, "second": {"type": "DSP48E1"}}
    assert assign_types(cells, "", "") == {"DSP48E1_0": BlockDelays()}
    assert assign_types({}, DSP, PROCESSOR) == {}
