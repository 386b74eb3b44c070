"""Timing of decoded netlists of a few cells, computed by hand from prjxray's SDF files."""

from types import SimpleNamespace

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.decode.cells import Cell
from nearflash.boards.open.decode.fabric import SitePin
from nearflash.boards.open.decode.paths import Delay, analyse
from nearflash.boards.open.decode.timing import TRUNK_PS, make_graph

SLICEM = """
(CELL (CELLTYPE "REG_INIT_FF") (INSTANCE SLICEM)
    (IOPATH CLK Q (0.118::0.147)(0.292::0.362))
    (HOLD CE (posedge CLK) (-0.007::-0.005)) (SETUP CE (posedge CLK) (0.088::0.109))
    (HOLD DIN (posedge CLK) (0.211::0.262)) (SETUP DIN (posedge CLK) (-0.074::-0.060)))
(CELL (CELLTYPE "LUT_OR_MEM6LRAM") (INSTANCE SLICEM)
    (HOLD WA1 (posedge CLK) (0.728::0.538)) (SETUP WA1 (posedge CLK) (0.184::0.066))
    (HOLD WE (posedge CLK) (0.008::0.010)) (SETUP WE (posedge CLK) (0.527::0.654)))
(CELL (CELLTYPE "LUT_OR_MEM6LRAM") (INSTANCE SLICEM/B6LUT)
    (IOPATH A1 O6 (0.045::0.056)(0.100::0.124)) (IOPATH CLK O6 (0.342::0.425)(0.936::1.161))
    (HOLD DI1 (posedge CLK) (0.154::0.191)) (SETUP DI1 (posedge CLK) (0.372::0.461)))
(CELL (CELLTYPE "CARRY4") (INSTANCE SLICEM)
    (IOPATH S0 O0 (0.060::0.079)(0.173::0.228)) (IOPATH S0 CO0 (0.087::0.115)(0.258::0.340))
    (IOPATH S0 CO1 (0.118::0.156)(0.330::0.434)) (IOPATH S1 CO1 (0.126::0.166)(0.359::0.472))
    (IOPATH CIN CO1 (0.045::0.056)(0.127::0.157)))
(CELL (CELLTYPE "CARRY4_AX") (INSTANCE SLICEM) (IOPATH DI0 CO1 (0.141::0.176)(0.394::0.488)))
(CELL (CELLTYPE "ROUTING_BEL") (INSTANCE SLICEM/CARRY4) (INTERCONNECT a6lut carry4 (0.010::0.012)(0.020::0.024)))
(CELL (CELLTYPE "ROUTING_BEL") (INSTANCE SLICEM/BMUX) (INTERCONNECT b6lut bmux (0.071::0.088)(0.166::0.206)))
(CELL (CELLTYPE "ROUTING_BEL") (INSTANCE SLICEM/B6LUT) (INTERCONNECT di b6lut (0.030::0.040)(0.090::0.102)))
(CELL (CELLTYPE "ROUTING_BEL") (INSTANCE SLICEM/CLKINV) (INTERCONNECT clk clkinv (0.046::0.057)(0.126::0.156)))
""" + "".join(
    f"""(CELL (CELLTYPE "ROUTING_BEL") (INSTANCE SLICEM/{letter}FF)
    (INTERCONNECT {letter.lower()}6lut {letter.lower()}ff (0.039::0.048)(0.088::0.109))
    (INTERCONNECT {letter.lower()}x {letter.lower()}ff (0.100::0.125)(0.175::0.217))
    (INTERCONNECT ce {letter.lower()}ff (0.041::0.051)(0.150::0.186))
    (INTERCONNECT sr {letter.lower()}ff (0.031::0.038)(0.079::0.098))
    (INTERCONNECT clk {letter.lower()}ff (0.046::0.057)(0.126::0.156)))
(CELL (CELLTYPE "ROUTING_BEL") (INSTANCE SLICEM/{letter}FFL)
    (INTERCONNECT {letter.lower()}6lut {letter.lower()}ffl (0.044::0.055)(0.100::0.124)))
"""
    for letter in "AB"
)
TEXTS = {
    "slicem": SLICEM,
    "CLK_HROW_BOT_R": '(CELL (CELLTYPE "BUFHCE") (INSTANCE BUFHCE) (IOPATH I O (0.020::0.043)(0.081::0.132)))',
    "CLK_BUFG_BOT_R": '(CELL (CELLTYPE "BUFGCTRL") (INSTANCE X) (IOPATH I O (0.026::0.029)(0.091::0.101)))',
    "DSP_L": """(CELL (CELLTYPE "DSP48E1_AREG_1_A_INPUT_DIRECT") (INSTANCE DSP48E1)
        (HOLD A (posedge CLK) (-0.362::0.139)) (SETUP A (posedge CLK) (-0.139::0.362)))
    (CELL (CELLTYPE "DSP48E1_AREG_0_A_INPUT_DIRECT") (INSTANCE DSP48E1) (SETUP A (posedge CLK) (9.0::9.0)))
    (CELL (CELLTYPE "DSP48E1_PREG_1") (INSTANCE DSP48E1) (IOPATH CLK P (0.126::0.192)(0.304::0.434)))""",
    "BRAM_L": """(CELL (CELLTYPE "RAMBFIFO36E1") (INSTANCE RAMBFIFO36E1)
        (HOLD ADDRAU (posedge CLKARDCLKU) (-0.566::0.360)) (SETUP ADDRAU (posedge CLKARDCLKU) (-0.360::0.566)))
    (CELL (CELLTYPE "RAMBFIFO36E1RAM_MODE_RAMB18TDP_U_WRITE_MODE_U_WF_EN_ECC_READ_FALSE_EN_ECC_WRITE_FALSE")
        (INSTANCE R)
        (HOLD DIADIU (posedge CLKARDCLKU) (-0.737::0.667)) (SETUP DIADIU (posedge CLKARDCLKU) (-0.667::0.737)))
    (CELL (CELLTYPE "RAMBFIFO36E1RAM_MODE_RAMB18TDP_U_WRITE_MODE_U_RF_EN_ECC_READ_FALSE_EN_ECC_WRITE_FALSE")
        (INSTANCE R)
        (HOLD DIADIU (posedge CLKARDCLKU) (-0.241::0.405)) (SETUP DIADIU (posedge CLKARDCLKU) (-0.405::0.241)))
    (CELL (CELLTYPE "RAMBFIFO36E1RAM_MODE_U_RAMB18TDP_U_DOA_REG_U_0_EN_ECC_READ_FALSE") (INSTANCE RAMBFIFO36E1)
        (IOPATH CLKARDCLKU DOADOU (0.585::1.098)(1.353::2.454)))
    (CELL (CELLTYPE "RAMBFIFO36E1RAM_MODE_U_RAMB18TDP_U_DOA_REG_U_1_EN_ECC_READ_FALSE") (INSTANCE RAMBFIFO36E1)
        (IOPATH CLKARDCLKU DOADOU (0.204::0.327)(0.468::0.882)))""",
}
PIN_DELAYS = {"B1": ["0.175", "0.218", "0.420", "0.521"], "D1": ["0.145", "0.226", "0.305", "0.540"]}
CLOCK, ROOT = "H/BUFHCE_X0Y0@I", "G/BUFGCTRL_X0Y0.BUFGCTRL"


def make_netlist(cells, pins):
    """Cells, and pins (name: net, and the pin that it leaves its site by); all routes are 0 ps."""
    pins = {"T/S@CLK": (CLOCK, "H.O"), CLOCK: (ROOT, "G.O")} | pins
    kinds = {"T": "SLICEM", "H": "BUFHCE", "G": "BUFGCTRL", "D": "DSP48E1", "R": "RAMB18E1"}
    known = {name.rpartition("@")[2] for name in pins} | {source.rpartition(".")[2] for _, source in pins.values()}
    site_pins = {pin: {"wire": pin, "delay": PIN_DELAYS.get(pin)} for pin in known}
    fabric = SimpleNamespace(
        database=SimpleNamespace(delays=lambda file: TEXTS.get(file, "")), step=lambda wire: ([wire], None),
        sites=lambda tile: [{"type": kinds[tile], "site_pins": site_pins}],
        kind=lambda tile: SimpleNamespace(wires=dict.fromkeys(known)),
    )  # fmt: skip
    everything = {ROOT: Cell("BUFGCTRL", {}, {"I0": "1"}), **cells,
                  **{name: Cell("PIN", {}, {"I": net}) for name, (net, _) in pins.items()}}  # fmt: skip
    ends = {
        name: (SitePin(name[0], 0, name.rpartition("@")[2]), SitePin(source[0], 0, source.rpartition(".")[2]))
        for name, (_, source) in pins.items()
    }
    return SimpleNamespace(
        cells=lambda: everything, fabric=fabric, pins=ends, find_site_type=lambda key: kinds[key[0]]
    )  # fmt: skip


def register(data, **inputs):
    return Cell("FF", {}, {"D": data, "CK": "T/S@CLK", "CE": "1", "SR": "0", **inputs})


def check_of(graph, name):
    (found,) = (check for check in graph.checks if check.name == name)
    return found


def test_a_path_through_a_lut_has_the_delays_of_its_pin_and_multiplexer():
    graph = make_graph(make_netlist(
        {"T/S.AFF": register("0"), "T/S.B6LUT": Cell("LUT", {}, {"I0": "T/S@B1"}), "T/S.BFF": register("T/S.B6LUT")},
        {"T/S@B1": ("T/S.AFF", "T.AQ")},
    ))  # fmt: skip
    result = analyse(graph)
    # Clock 132 + 156, Q 362, pin 521, LUT 124, to the register 124 (AFFL), -60; then the clock, of which 51 are shared.
    assert result.fmax_hz == 10**12 // (132 + 156 + 362 + 521 + 124 + 124 - 60 - (81 + 126) - 51)
    assert result.hold_slacks_ps == (81 + 126 + 292 + 420 + 100 + 88 + 51 - (132 + 156) - 262,)


def test_an_output_over_a_multiplexer_pays_for_it():
    graph = make_graph(make_netlist(
        {"T/S.B6LUT": Cell("LUT", {}, {}), "T/S.AFF": register("T/S@AX")}, {"T/S@AX": ("T/S.B6LUT", "T.BMUX")}
    ))  # fmt: skip
    assert graph.arcs["T/S@AX"] == [("T/S.B6LUT", Delay(166, 206))]
    assert graph.arcs["T/S.AFF.D"] == [("T/S@AX", Delay(175, 217))]


def test_a_memory_in_a_lut_is_read_and_written():
    memory = Cell(
        "RAM", {}, {"R0": "T/S@B1", "W0": "T/S@D1", "D": "T/S@DI", "WE": "T/S@WE", "CK": "T/S@CLK", "R1": "0"}
    )
    graph = make_graph(make_netlist(
        {"T/S.B6LUT": memory, "T/S.AFF": register("0")},
        {f"T/S@{pin}": ("T/S.AFF", "T.AQ") for pin in ("B1", "D1", "DI", "WE")},
    ))  # fmt: skip
    assert graph.arcs["T/S.B6LUT"] == [("T/S@B1", Delay(100, 124))]
    assert graph.launches["T/S.B6LUT"][1] == Delay(936, 1161)
    limits = {name: (check_of(graph, f"T/S.B6LUT.{name}").setup, check_of(graph, f"T/S.B6LUT.{name}").hold)
              for name in ("W0", "D", "WE")}  # fmt: skip
    assert limits == {"W0": (184, 538), "D": (461, 191), "WE": (654, 10)}
    assert graph.arcs["T/S.B6LUT.D"] == [("T/S@DI", Delay(90, 102))]
    assert graph.arcs["T/S@D1"] == [("T/S.AFF", Delay(305, 540))]


def test_a_carry_has_delays_from_the_inputs_of_all_bits_before_it():
    first = Cell("CARRY", {}, {"S": "T/S.A6LUT", "CI": "T/S@CIN", "DI": "T/S@AX"})
    graph = make_graph(make_netlist(
        {"T/S.CO1": Cell("CARRY", {}, {"S": "T/S.B6LUT", "CI": "T/S.CO0", "DI": "1"}),
         "T/S.O0": Cell("SUM", {}, {"S": "T/S.A6LUT", "CI": "1"}), "T/S.CO0": first}
        | {"T/S.CO0": Cell("CARRY", {}, {"S": "T/S.A6LUT", "CI": "0", "DI": "0"})},
        {},
    ))  # fmt: skip
    assert graph.arcs["T/S.CO1"] == [("T/S.A6LUT", Delay(350, 458)), ("T/S.B6LUT", Delay(359, 472))]
    assert graph.arcs["T/S.O0"] == [("T/S.A6LUT", Delay(193, 252))] and graph.arcs["T/S.CO0"][0][1] == Delay(278, 364)
    chained = make_netlist({"T/S.CO1": Cell("CARRY", {}, {"S": "0", "CI": "T/S.CO0", "DI": "0"}), "T/S.CO0": first},
                           {"T/S@CIN": ("1", "T.COUT"), "T/S@AX": ("1", "T.AQ")})  # fmt: skip
    with pytest.raises(FormatError, match="the database must have a delay of SLICEM from CIN to CO0, not none"):
        make_graph(chained)


def test_registers_of_a_dsp_slice_check_and_launch():
    config = dict.fromkeys(("A_INPUT", "B_INPUT", "USE_DPORT"), 0) | {"AREG": 1, "PREG": 1}
    inputs = {"A0": "D/S@A0", "A1": "0", "CLK": "D/S@CLK", "OPMODE0": "1", "OPMODE1": "0"}
    graph = make_graph(make_netlist(
        {"D/S.DSP48E1": Cell("DSP48E1", config, inputs), "T/S.AFF": register("T/S@AX")},
        {"D/S@A0": ("T/S.AFF", "T.AQ"), "D/S@CLK": (CLOCK, "H.O"), "T/S@AX": ("D/S.DSP48E1:P7", "D.P7")},
    ))  # fmt: skip
    check = check_of(graph, "D/S.DSP48E1.A0.CLK")
    assert (check.setup, check.hold) == (362, 139) and check.clock.arrival == Delay(81, 132)
    assert graph.launches["D/S.DSP48E1:P7"] == (check.clock, Delay(304, 434))


def test_a_dsp_slice_whose_clock_is_constant_behind_a_buffer_has_no_registers():
    """nextpnr sends a constant to the clocks of such slices by way of a regional clock buffer."""
    config = dict.fromkeys(("A_INPUT", "B_INPUT", "USE_DPORT"), 0) | {"AREG": 1, "PREG": 1}
    graph = make_graph(make_netlist(
        {"D/S.DSP48E1": Cell("DSP48E1", config, {"A0": "D/S@A0", "CLK": "D/S@CLK", "OPMODE0": "1", "OPMODE1": "0"})},
        {"D/S@A0": ("T/S.AFF", "T.AQ"), "D/S@CLK": ("H/BUFHCE_X0Y1@I", "H.O"), "H/BUFHCE_X0Y1@I": ("0", "G.O")},
    ))  # fmt: skip
    assert not graph.checks and not graph.launches


@pytest.mark.parametrize(("register_there", "launch"), [(0, Delay(1353, 2454)), (1, Delay(468, 882))])
def test_a_block_ram_launches_behind_its_array_or_its_register(register_there, launch):
    config = {"READ_WIDTH_A": 18, "WRITE_WIDTH_B": 18, "DOA_REG": register_there, "DOB_REG": 0}
    inputs = {"ADDRARDADDR3": "R/S@A3", "CLKARDCLK": "R/S@CLK", "CLKBWRCLK": "1"}
    graph = make_graph(make_netlist(
        {"R/S.RAMB18E1": Cell("RAMB18E1", config, inputs), "T/S.AFF": register("T/S@AX")},
        {"R/S@A3": ("T/S.AFF", "T.AQ"), "R/S@CLK": (CLOCK, "H.O"), "T/S@AX": ("R/S.RAMB18E1:DOADO5", "R.DO5")},
    ))  # fmt: skip
    assert graph.launches["R/S.RAMB18E1:DOADO5"][1] == launch
    assert check_of(graph, "R/S.RAMB18E1.ADDRARDADDR3").setup == 566


@pytest.mark.parametrize(("mode", "limits"), [("READ_FIRST", (241, 405)), ("WRITE_FIRST", (737, 667))])
def test_what_a_block_ram_is_given_must_hold_as_its_write_mode_wants(mode, limits):
    config = {"READ_WIDTH_A": 18, "WRITE_WIDTH_B": 18, "DOA_REG": 0, "DOB_REG": 0, "WRITE_MODE_A": mode}
    inputs = {"DIADI7": "R/S@DI7", "CLKARDCLK": "R/S@CLK", "CLKBWRCLK": "1"}
    graph = make_graph(make_netlist(
        {"R/S.RAMB18E1": Cell("RAMB18E1", config, inputs), "T/S.AFF": register("0")},
        {"R/S@DI7": ("T/S.AFF", "T.AQ"), "R/S@CLK": (CLOCK, "H.O")},
    ))  # fmt: skip
    check = check_of(graph, "R/S.RAMB18E1.DIADI7")
    assert (check.setup, check.hold) == limits


def test_a_signal_over_a_clock_buffer_pays_for_the_trunk():
    graph = make_graph(make_netlist(
        {"T/S.AFF": register("T/S@AX"), "G/BUFGCTRL_X0Y1.BUFGCTRL": Cell("BUFGCTRL", {}, {"I0": "G/BUFGCTRL_X0Y1@I0"})},
        {"T/S@AX": ("G/BUFGCTRL_X0Y1.BUFGCTRL", "G.O"), "G/BUFGCTRL_X0Y1@I0": ("T/S.AFF", "T.AQ")},
    ))  # fmt: skip
    assert graph.arcs["G/BUFGCTRL_X0Y1.BUFGCTRL"] == [("G/BUFGCTRL_X0Y1@I0", Delay(91, 101 + TRUNK_PS))]


def test_a_clock_from_logic_is_an_error():
    with pytest.raises(FormatError, match=r"a clock must come from a global buffer, not T/S\.B6LUT"):
        make_graph(make_netlist({"T/S.AFF": register("0", CK="T/S@C"), "T/S.B6LUT": Cell("LUT", {}, {})},
                                {"T/S@C": ("T/S.B6LUT", "T.B")}))  # fmt: skip
