"""Delays of hard blocks, from SDF files as prjxray's."""

from nearflash.boards.open.timing import BlockDelays, dsp_delays, dsp_parameters, processor_delays

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
NONE = {"AREG": "0", "MREG": "0", "PREG": "0"}


def test_a_slice_without_registers_passes_its_inputs_on():
    paths = {("A", "CARRYOUT"): 3818, ("A", "P"): 3841}
    assert dsp_delays(DSP, [NONE]) == BlockDelays(paths=paths)
    assert dsp_delays(DSP, [{**NONE, "USE_MULT": "NONE"}]) == BlockDelays(paths={("A", "P"): 2077})


def test_registers_begin_and_end_paths():
    registered = BlockDelays(setups={("A", "CLK"): 362}, launches={("CLK", "P"): 434})
    assert dsp_delays(DSP, [{}]) == registered, "registers are what a slice has where nothing is said"
    assert dsp_delays(DSP, [{"AREG": "1", "MREG": "1", "PREG": "1"}]) == registered
    assert dsp_delays(DSP, [{"AREG": "2", "MREG": "0"}]) == BlockDelays(launches={("CLK", "P"): 434})


def test_of_several_slices_the_largest_delay_counts():
    found = dsp_delays(DSP, [{**NONE, "USE_MULT": "NONE"}, NONE, {}])
    assert found.paths["A", "P"] == 3841
    assert found.setups["A", "CLK"] == 362 and found.launches["CLK", "P"] == 434
    assert dsp_delays(DSP, []) == BlockDelays() == dsp_delays("", [NONE])


def test_the_processor_has_its_ports_delays():
    assert processor_delays(PROCESSOR) == BlockDelays(
        setups={("SAXIHP0WDATA", "SAXIHP0ACLK"): 800}, launches={("SAXIHP0ACLK", "SAXIHP0RDATA"): 1507}
    )


def test_parameters_are_read_from_a_netlist():
    cells = {
        "mul": {"type": "DSP48E1", "parameters": {"AREG": f"{2:032b}", "USE_MULT": "MULTIPLY", "A_INPUT": "CASCADE "}},
        "lut": {"type": "LUT2", "parameters": {"INIT": "0110"}},
    }
    assert dsp_parameters(cells) == [{"AREG": "2", "USE_MULT": "MULTIPLY", "A_INPUT": "CASCADE"}]
