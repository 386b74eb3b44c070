"""The hardware handoff: what PYNQ finds in it, read as its parser reads it."""

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nearflash.abi.errors import ConfigError
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.boards.zynq7.hwh import FCLK_SOURCE_HZ, ClockDividers, dividers, hwh_text
from nearflash.device.bitstreams import load_board

PYNQ = Path(__file__).parents[3] / ".venv-pynq/bin/python"
_PARSE = """import json, sys, warnings
warnings.simplefilter("ignore")
from pynq.pl_server.hwh_parser import _HWHZynq
parsed = _HWHZynq(hwh_data=sys.stdin.read())
print(json.dumps([parsed.ip_dict, parsed.clock_dict, parsed.interrupt_pins]))
"""


@pytest.fixture(params=["update", "attend", "expand"])
def kernel(request):
    return request.param


@pytest.fixture
def root(kernel):
    board = load_board("pynq-z2")
    return ElementTree.fromstring(hwh_text(board, board.build(kernel), ClockDividers(11, 1)))


def parameters(module):
    return {each.get("NAME"): each.get("VALUE") for each in module.findall("./PARAMETERS/PARAMETER")}


def modules(root):
    return {module.get("MODTYPE"): module for module in root.iter("MODULE")}


def test_registers_go_from_the_processors_to_the_kernel(root):
    buses = {bus.get("NAME"): bus.attrib for bus in root.iter("BUSINTERFACE")}
    assert {name: bus["TYPE"] for name, bus in buses.items()} == {"M_AXI_GP0": "MASTER", "s_axi_control": "SLAVE"}
    (memory,) = root.iter("MEMRANGE")
    assert {memory.get("MASTERBUSINTERFACE"), memory.get("SLAVEBUSINTERFACE")} == set(buses)
    assert all(":aximm:" in bus["VLNV"] and bus["DATAWIDTH"] == "32" for bus in buses.values())


def test_the_processing_system_says_that_it_is_not_in_the_logic(root, kernel):
    """pynqmetadata up to 0.1.9, of PYNQ's images, finds it by that: `Overlay` ended in an IndexError."""
    found = {name: module.get("IS_PL") for name, module in modules(root).items()}
    assert found == {"processing_system7": "FALSE", kernel: "TRUE"}


def test_the_kernel_is_at_its_address_with_its_name(root, kernel):
    assert modules(root)[kernel].get("VLNV") == f"nearflash:kernel:{kernel}:1.0"
    (window,) = root.iter("MEMRANGE")
    assert (window.get("INSTANCE"), window.get("MEMTYPE")) == (kernel, "REGISTER")
    assert (int(window.get("BASEVALUE"), 16), int(window.get("HIGHVALUE"), 16)) == (0x4000_0000, 0x4000_0FFF)


def test_every_word_of_every_register_is_there(root, kernel):
    found = {}
    for element in root.iter("REGISTER"):
        properties = {each.get("NAME"): each.get("VALUE") for each in element.findall("./PROPERTY")}
        assert properties["SIZE"] == "32" and properties["DESCRIPTION"]
        found[int(properties["ADDRESS_OFFSET"])] = (element.get("NAME"), properties["ACCESS"])
    expected = {}
    for register in REGISTER_MAPS[kernel]:
        access = "read-only" if register.access == "ro" else "read-write"
        if register.width_bits == 32:
            expected[register.offset] = (register.name, access)
        else:
            expected |= {register.offset + 4 * at: (f"{register.name}_{at + 1}", access) for at in (0, 1)}
    assert found == expected


def test_fields_of_a_register_have_their_bits(root):
    (control,) = (element for element in root.iter("REGISTER") if element.get("NAME") == "control")
    bits = {
        field.get("NAME"): field.find("./PROPERTY[@NAME='BIT_OFFSET']").get("VALUE") for field in control.iter("FIELD")
    }
    assert bits == {"ap_start": "0", "ap_done": "1", "ap_idle": "2", "ap_ready": "3", "ap_continue": "4",
                    "auto_restart": "7"}  # fmt: skip


def test_the_processor_system_has_the_clock_and_the_ports_that_are_used(root, kernel):
    found = parameters(modules(root)["processing_system7"])
    assert (found["PCW_FCLK0_PERIPHERAL_DIVISOR0"], found["PCW_FCLK0_PERIPHERAL_DIVISOR1"]) == ("11", "1")
    assert found["PCW_FPGA0_PERIPHERAL_FREQMHZ"] == found["PSU__CRL_APB__PL0_REF_CTRL__ACT_FREQMHZ"] == "90.909090"
    assert {found[f"PCW_FCLK{index}_PERIPHERAL_CLKSRC"] for index in range(4)} == {"IO PLL"}
    assert [found[f"PCW_FPGA_FCLK{index}_ENABLE"] for index in range(4)] == ["1", "0", "0", "0"]
    used = {"update": 2, "attend": 1, "expand": 2}[kernel]
    assert [found[f"PCW_USE_S_AXI_HP{index}"] for index in range(4)] == ["1"] * used + ["0"] * (4 - used)
    assert {name for name in found if name.endswith("DATA_WIDTH")} == {
        f"PCW_S_AXI_HP{index}_DATA_WIDTH" for index in range(used)
    }


def test_the_interrupt_is_on_the_processor_systems_net(root, kernel):
    nets = {(module.get("MODTYPE"), port.get("NAME")): port.get("SIGNAME")
            for module in root.iter("MODULE") for port in module.iter("PORT")}  # fmt: skip
    assert nets["processing_system7", "IRQ_F2P"] == nets[kernel, "interrupt"]
    assert nets["processing_system7", "FCLK_CLK0"] == nets[kernel, "ap_clk"]


@pytest.mark.skipif(not PYNQ.exists(), reason=f"needs pynq 4 in {PYNQ.parents[1]} (its numpy is older than ours)")
def test_pynqs_own_parser_accepts_it(kernel):
    board = load_board("pynq-z2")
    text = hwh_text(board, board.build(kernel), ClockDividers(5, 2))
    done = subprocess.run([PYNQ, "-c", _PARSE], input=text, capture_output=True, text=True, check=True)
    blocks, clocks, pins = json.loads(done.stdout.splitlines()[-1])
    assert blocks[kernel]["phys_addr"] == 0x4000_0000
    assert blocks[kernel]["interrupts"]["interrupt"]["raw_irq"] == 61
    assert clocks["0"] == {"enable": 1, "divisor0": 5, "divisor1": 2}
    assert f"{kernel}/interrupt" in pins


@pytest.mark.parametrize(
    ("fmax_hz", "clock_hz"),
    [(100_000_000, 100_000_000), (99_999_999, 90_909_090), (125_500_000, 125_000_000), (83_400_000, 83_333_333),
     (1_000_000_000, 1_000_000_000), (2_000_000_000, 1_000_000_000), (252_000, FCLK_SOURCE_HZ // 63**2)],
)  # fmt: skip
def test_the_clock_is_the_fastest_that_the_dividers_give(fmax_hz, clock_hz):
    found = dividers(fmax_hz)
    assert found.clock_hz == clock_hz <= fmax_hz
    assert 1 <= found.second <= found.first <= 63


def test_a_clock_that_no_divider_reaches_is_an_error():
    with pytest.raises(ConfigError, match="fmax_hz must be at least 251952, not 251000"):
        dividers(251_000)
