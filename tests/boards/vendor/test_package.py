"""Vendor packages: every script runs under tclsh with stubs, and names nothing that does not exist."""

import os
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nearflash.abi.errors import BitstreamError, ConfigError
from nearflash.abi.fields import Access
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.boards.vendor.block_design import block_design_tcl
from nearflash.boards.vendor.package import write_package
from nearflash.device.bitstreams import load_board
from nearflash.verify.vendor.block_design import check_block_design
from nearflash.verify.vendor.check import (
    check_connectivity,
    check_constraints,
    check_kernel_xml,
    check_packaging,
)
from nearflash.verify.vendor.recording import option, record

pytestmark = pytest.mark.skipif(shutil.which("tclsh") is None, reason="tclsh is not installed (apt install tcl)")
ZYNQ = ("zynq7045", "zu17eg")
KERNELS = (
    ("ku3p", "update"),
    ("smartssd", "update"),
    ("smartssd", "expand"),
    ("smartssd", "attend"),
    ("zynq7045", "attend"),
    ("zu17eg", "attend"),
)


@pytest.fixture
def environment(tmp_path):
    """With an empty preset of the processor, which a board without one of its own needs."""
    (tmp_path / "preset.tcl").write_text("")
    return {**os.environ, "NEARFLASH_PS_PRESET": str(tmp_path / "preset.tcl")}


@pytest.fixture
def copied(packages, tmp_path):
    """A function that copies a board's package, to be damaged."""

    def copy(name):
        folder = tmp_path / name
        shutil.copytree(packages[name][2], folder)
        return folder

    return copy


def edit(path, old, new, count=1):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


@pytest.mark.parametrize(("board", "kernel"), KERNELS)
def test_packaging_misses_nothing(packages, board, kernel):
    folder = packages[board][2]
    assert check_packaging(kernel, folder) == []
    assert check_constraints(folder / f"{kernel}.xdc", kernel, folder) == []


@pytest.mark.parametrize("name", ZYNQ)
def test_block_designs_miss_nothing(packages, environment, name):
    folder = packages[name][2]
    assert check_block_design("attend", folder, environment) == []
    assert check_constraints(folder / "system.xdc", "attend", folder) == []


@pytest.mark.parametrize("kernel", ["update", "expand", "attend"])
def test_kernel_xml_is_the_register_table(packages, kernel):
    folder = packages["smartssd"][2]
    assert check_kernel_xml(kernel, folder) == []
    root = ElementTree.parse(folder / f"{kernel}.xml").getroot()
    offsets = [int(each.attrib["offset"], 0) for each in root.iter("arg")]
    assert offsets == [register.offset for register in REGISTER_MAPS[kernel] if register.access is Access.RW]
    attributes = next(root.iter("kernel")).attrib
    assert attributes["hwControlProtocol"] == "ap_ctrl_chain" and attributes["vlnv"] == f"nearflash:kernel:{kernel}:1.0"
    assert [each.attrib["id"] for each in root.iter("arg")] == [str(index) for index in range(len(offsets))]


def test_every_kernel_of_the_smartssd_reaches_its_bank(packages):
    folder = packages["smartssd"][2]
    assert check_connectivity(["update", "expand", "attend"], folder) == []
    text = (folder / "connectivity.cfg").read_text()
    assert "platform=xilinx_u2_gen3x4_xdma_gc_2_202110_1\nkernel_frequency=300\n" in text
    assert text.count("sp=update_1.") == 4 and text.count("sp=expand_1.") == 2
    assert text.count("sp=attend_1.") == 1 and text.count(":SLR0\n") == 3


@pytest.mark.parametrize(("name", "address"), [("zynq7045", "0x40000000"), ("zu17eg", "0xa0000000")])
def test_addresses_of_registers_and_memory(packages, environment, name, address):
    board, _, folder, _ = packages[name]
    assigned = [call for call in record(folder / "system.tcl", environment) if call[0] == "assign_bd_address"]
    assert [option(call, "-offset") for call in assigned] == [address, "0x0"]
    assert option(assigned[1], "-range") == f"{board.memory.size_bytes >> 20}M"


def test_clocks_are_the_boards(packages):
    periods = {}
    for name, (_, designs, folder, _) in packages.items():
        calls = record(folder / f"{designs[0].top}.xdc")
        periods[name] = next(option(call, "-period") for call in calls if call[0] == "create_clock")
        assert sum(call[0] == "set_false_path" for call in calls) == 2
    assert periods == {"ku3p": "8.000", "smartssd": "3.333", "zynq7045": "3.509", "zu17eg": "3.333"}


def test_only_the_smartssd_gets_objects_for_vitis(packages):
    made = {name: {path.name for path in paths} for name, (*_, paths) in packages.items()}
    assert {"connectivity.cfg", "update.xml", "expand.xml", "attend.xml"} <= made["smartssd"]
    assert "system.tcl" not in made["smartssd"]
    assert "connectivity.cfg" not in made["zynq7045"] and {"system.tcl", "nand_phy.v"} <= made["zynq7045"]
    assert made["ku3p"] == {"update.v", "update.xdc", "package_update.tcl"}
    calls = record(packages["smartssd"][2] / "package_update.tcl")
    package = next(call for call in calls if call[0] == "package_xo")
    assert option(package, "-ctrl_protocol") == "ap_ctrl_chain" and option(package, "-kernel_xml").endswith(
        "update.xml"
    )
    assert not [call for call in record(packages["zu17eg"][2] / "package_attend.tcl") if call[0] == "package_xo"]


def test_a_board_without_a_preset_states_what_it_needs(packages):
    without = {name: value for name, value in os.environ.items() if name != "NEARFLASH_PS_PRESET"}
    assert check_block_design("attend", packages["zynq7045"][2], without) == []
    with pytest.raises(BitstreamError, match=r"system.tcl must run .*NEARFLASH_PS_PRESET must name the Tcl file"):
        check_block_design("attend", packages["zu17eg"][2], without)


def test_a_phy_of_the_boards_takes_the_place_of_ours(packages, environment, tmp_path):
    phy = tmp_path / "phy"
    phy.mkdir()
    shutil.copy(packages["zynq7045"][2] / "nand_phy.v", phy)
    (phy / "pads.xdc").write_text("create_clock -name dqs -period 10 [get_ports ap_clk]\n")
    (phy / "connect.tcl").write_text("get_bd_cells nand_phy_0\n")
    calls = record(packages["zynq7045"][2] / "system.tcl", environment | {"NEARFLASH_NAND_PHY": str(phy)})
    added = [call[-1] for call in calls if call[0] == "add_files"]
    assert str(phy / "nand_phy.v") in added and str(phy / "pads.xdc") in added
    assert ("get_bd_cells", "nand_phy_0") in calls


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("package_update.tcl", "-busif m_axi_gmem3", "-busif gmem3", "update has no complete interface gmem3"),
        ("package_update.tcl", "-clock ap_clk", "-clock ap_clock", "s_axi_control: update has no pin ap_clock"),
        ("package_update.tcl", "update.v]", "updates.v]", "add_files: updates.v is missing or empty"),
        ("package_update.tcl", "update.xml]", "updates.xml]", "package_xo: updates.xml is missing or empty"),
        ("package_update.tcl", "interface interrupt", "interface irq", "update has no pin irq"),
        ("package_update.tcl", "address_offset 0x04c", "address_offset 0x048", "register:program must be"),
        ("package_update.tcl", "bit_width 2 ", "bit_width 3 ", "field:decay_mode:register:program must be"),
        ("package_update.tcl", "set_property top update", "set_property top updates", "top must be update"),
        ("update.v", "input m_axi_gmem2_awready;", "input awready;", "update has no complete interface m_axi_gmem2"),
    ],
)  # fmt: skip
def test_a_wrong_name_in_packaging_is_noticed(copied, file, old, new, complaint):
    folder = copied("smartssd")
    edit(folder / file, old, new)
    assert any(each.startswith(complaint) for each in check_packaging("update", folder))


def test_a_missing_register_and_an_open_bus_are_noticed(copied):
    folder = copied("smartssd")
    path = folder / "package_expand.tcl"
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(line for line in lines if "-busif m_axi_gmem1" not in line and "add_register rows" not in line)
    )
    complaints = check_packaging("expand", folder)
    assert "m_axi_gmem1 has no clock" in complaints
    assert any(each.startswith("register:rows must be {'address_offset'") for each in complaints)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("attend/s_axi_control]", "attend/s_axi_ctrl]", "attend/s_axi_ctrl is no interface"),
        ("[get_bd_pins ps/IRQ_F2P]", "[get_bd_pins ps/IRQ]", "ps/IRQ is no pin"),
        ("nand_phy_7/read_ready", "nand_phy_7/read_valid", "attend/nand7_read_ready -> nand_phy_7/read_valid must go"),
        ("attend/nand3_cycles_payload", "attend/nand3_write_payload", "must have one width, not 64 and 30"),
        ("attend/nand3_write_valid", "attend/nand2_write_valid", "attend/nand3_write_valid is not connected"),
        ("get_bd_intf_pins ps/S_AXI_HP0", "get_bd_intf_pins ps/M_AXI_GP0", "must go from a master to a slave"),
        ("CONFIG.PCW_USE_S_AXI_HP0 1", "CONFIG.PCW_USE_S_AXI_HP0 0", "ps/S_AXI_HP0 needs the option"),
        ("ps/S_AXI_HP0/HP0_DDR_LOWOCM", "ps/S_AXI_HP0/DDR", "names what does not exist"),
        ("processing_system7:5.5 ps", "processing_system8:5.5 ps", "ps: no IP is named"),
        ("nand_phy.v]", "phy.v]", "add_files: phy.v is missing or empty"),
        ("ip_attend", "ip_update", "ip_repo_paths must be the folder"),
    ],
)  # fmt: skip
def test_a_wrong_name_in_a_block_design_is_noticed(copied, environment, old, new, complaint):
    folder = copied("zynq7045")
    edit(folder / "system.tcl", old, new)
    complaints = check_block_design("attend", folder, environment)
    assert any(complaint in each for each in complaints), complaints


def test_an_open_pin_and_two_drivers_are_noticed(copied, environment):
    folder = copied("zynq7045")
    edit(folder / "system.tcl", "connect_bd_net [get_bd_pins clock/locked] [get_bd_pins reset/dcm_locked]\n",
         "connect_bd_net [get_bd_pins clock/clk_out1] [get_bd_pins attend/ap_clk]\n")  # fmt: skip
    assert check_block_design("attend", folder, environment) == [
        "attend/ap_clk has two drivers",
        "clock/locked is not connected",
        "reset/dcm_locked is not connected",
    ]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('offset="0x054"', 'offset="0x058"', "gradient_bytes must be"),
        ('port="m_axi_gmem3"', 'port="m_axi_gmem5"', "update has no interface m_axi_gmem5"),
        ('name="m_axi_gmem2" mode="master"', 'name="m_axi_gmem2" mode="slave"', "ports must be"),
        ('<arg name="eps"', '<arg name="epsilon"', "eps must be an argument"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_xml_is_noticed(copied, old, new, complaint):
    folder = copied("smartssd")
    edit(folder / "update.xml", old, new)
    assert any(complaint in each for each in check_kernel_xml("update", folder))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("sp=update_1.m_axi_gmem2", "sp=update_1.m_axi_gmem7", "sp: update_1.m_axi_gmem7 is no memory port"),
        ("sp=expand_1.m_axi_gmem1:DDR[0]\n", "", "expand_1.m_axi_gmem1 has no memory"),
        ("nk=expand:1:expand_1", "nk=expander:1:expand_1", "nk: expander is no kernel"),
        ("slr=update_1", "slr=update_2", "slr: update_2 is no compute unit"),
    ],
)  # fmt: skip
def test_a_wrong_connectivity_is_noticed(copied, old, new, complaint):
    folder = copied("smartssd")
    edit(folder / "connectivity.cfg", old, new)
    assert complaint in check_connectivity(["update", "expand"], folder)


def test_a_wrong_constraint_is_noticed(copied):
    folder = copied("zynq7045")
    edit(folder / "attend.xdc", "get_ports interrupt", "get_ports irq")
    edit(folder / "system.xdc", "*/attend/ap_rst_n", "*/attend/reset")
    assert check_constraints(folder / "attend.xdc", "attend", folder) == ["attend.xdc: attend has no port irq"]
    assert check_constraints(folder / "system.xdc", "attend", folder) == ["system.xdc: no pin reset of a cell attend"]


def test_commands_and_options_that_do_not_exist_are_errors(tmp_path):
    script = tmp_path / "script.tcl"
    script.write_text("create_projects here\n")
    with pytest.raises(BitstreamError, match=r"script.tcl must run .*no vendor command is named create_projects"):
        record(script)
    script.write_text("create_project here -force -board some\n")
    with pytest.raises(BitstreamError, match=r"create_project has no option -board"):
        record(script)


def test_words_of_a_record_are_exact(tmp_path):
    script = tmp_path / "script.tcl"
    script.write_text('set_property name "a b\tc\\\\d" [current_project]\n')
    assert record(script) == [("current_project",), ("set_property", "name", "a b\tc\\d", "project")]


def test_without_tclsh_the_error_states_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BitstreamError, match=r"tclsh must be installed .*apt install tcl"):
        record(tmp_path / "script.tcl")


def test_packages_are_of_vendor_boards(packages, tmp_path):
    with pytest.raises(ConfigError, match=r"flow of pynq-z2 must be vivado or vitis .*not 'open'"):
        write_package(load_board("pynq-z2"), [], tmp_path / "none")
    board, designs, _, _ = packages["zynq7045"]
    with pytest.raises(ConfigError, match=r"kernels of zynq7045 must be one, not 2"):
        write_package(board, designs * 2, tmp_path / "none")
    with pytest.raises(ConfigError, match=r"part of zynq7045 must begin with xc7z or xczu, not 'xcku3p'"):
        block_design_tcl(replace(board, part="xcku3p"), designs[0])
    assert not (tmp_path / "none").exists()
